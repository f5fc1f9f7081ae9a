"""The records of the spool's outbox, and what they are decoded to."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from core.batches.jobs import LineResult
from core.events import EngineCount, ModerationEvent, OpenedRequest, UsageEvent

USAGE = "usage"
MODERATION = "moderation"
LINE = "line"
RECEIPT = "receipt"
OPENED = "opened"  # of a parked record: an open request that cannot be settled
OPERATION = "operation"  # of a parked operation of the log that is not a row of the outbox
opened_decoder = msgspec.msgpack.Decoder(OpenedRequest)
_usage = msgspec.msgpack.Decoder(UsageEvent)
_receipt = msgspec.msgpack.Decoder(EngineCount)
_moderation = msgspec.msgpack.Decoder(list[ModerationEvent])
_line = msgspec.msgpack.Decoder(tuple[str, LineResult])

OutboxRow = tuple[int, str, bytes]  # number, topic, body


@dataclass(frozen=True, slots=True)
class OutboxBatch:
    """The records of one read of the outbox, in order."""

    usage: list[UsageEvent]
    receipts: list[EngineCount]
    moderation: list[ModerationEvent]
    lines: list[tuple[str, LineResult]]  # answered lines of batches: (batch id, answer)


def decode_outbox(rows: Sequence[OutboxRow]) -> OutboxBatch:
    """Raises ValueError if a record cannot be read."""
    return OutboxBatch(
        usage=[_usage.decode(body) for _, topic, body in rows if topic == USAGE],
        receipts=[_receipt.decode(body) for _, topic, body in rows if topic == RECEIPT],
        moderation=[
            event
            for _, topic, body in rows
            if topic == MODERATION
            for event in _moderation.decode(body)
        ],
        lines=[_line.decode(body) for _, topic, body in rows if topic == LINE],
    )


def request_id_of(topic: str, body: bytes) -> str:
    """The request of a record, or "" if it has none or cannot be read."""
    try:
        if topic == USAGE:
            return _usage.decode(body).request_id
        if topic == OPENED:
            return opened_decoder.decode(body).request_id
        if topic == RECEIPT:
            return _receipt.decode(body).request_id
        if topic == MODERATION:
            return _moderation.decode(body)[0].request_id
    except (ValueError, IndexError):
        pass
    return ""
