"""Messages of records: a batch of the outbox as messages of one tenant each, and back.

A message holds many records, since a stream's cost is by message. Its id is a digest of its body, so
that a batch that is published again is recognised.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, Struct

from core.batches.jobs import LineResult
from core.events import EngineCount, ModerationEvent, UsageEvent
from gateway.metering.spool_records import OutboxBatch
from gateway.metering.streams.base import Message

MESSAGE_BYTES = 128 * 1024  # a message ends with the record that reaches it
USAGE, RECEIPT, MODERATION, LINE = "usage", "receipts", "moderation", "lines"


class _Packed(Struct, omit_defaults=True):
    """The body of a message: encoded records by kind."""

    usage: list[Raw] = msgspec.field(default_factory=list)
    receipts: list[Raw] = msgspec.field(default_factory=list)
    moderation: list[Raw] = msgspec.field(default_factory=list)
    lines: list[Raw] = msgspec.field(default_factory=list)


_encode = msgspec.msgpack.Encoder().encode
_packed = msgspec.msgpack.Decoder(_Packed)
_DECODERS: dict[str, msgspec.msgpack.Decoder[object]] = {
    USAGE: msgspec.msgpack.Decoder(UsageEvent),
    RECEIPT: msgspec.msgpack.Decoder(EngineCount),
    MODERATION: msgspec.msgpack.Decoder(ModerationEvent),
    LINE: msgspec.msgpack.Decoder(tuple[str, LineResult]),
}


@dataclass(slots=True)
class Unreadable:
    """A record, or a whole message where `kind` is empty, that is not what it should be."""

    kind: str
    body: bytes
    reason: str


@dataclass(slots=True)
class Read:
    """The records of messages."""

    records: list[tuple[str, object]] = field(default_factory=list)  # kind and record
    unreadable: list[Unreadable] = field(default_factory=list)

    def batch(self) -> OutboxBatch:
        return batch_of(self.records)


def messages_of(batch: OutboxBatch, most_bytes: int) -> tuple[list[Message], OutboxBatch]:
    """The messages of a batch, and the records that are larger than a message may be."""
    messages: list[Message] = []
    large: list[tuple[str, object]] = []
    open_messages: dict[str, tuple[_Packed, int]] = {}
    room = most_bytes - 256  # of the body, for the names of the kinds and lengths
    for tenant_id, kind, record in _by_tenant(batch):
        raw = _encode(record)
        if len(raw) > room:
            large.append((kind, record))
            continue
        packed, size = open_messages.pop(tenant_id, (_Packed(), 0))
        if size + len(raw) > min(room, MESSAGE_BYTES) and size:
            messages.append(_message(tenant_id, packed))
            packed, size = _Packed(), 0
        getattr(packed, kind).append(Raw(raw))
        open_messages[tenant_id] = (packed, size + len(raw))
    messages += [_message(tenant_id, packed) for tenant_id, (packed, _) in open_messages.items()]
    return messages, batch_of(large)


def read(bodies: Iterable[bytes]) -> Read:
    """Decode messages; messages that cannot be read are returned separately."""
    found = Read()
    for body in bodies:
        try:
            packed = _packed.decode(body)
        except ValueError as error:
            found.unreadable.append(Unreadable("", body, str(error)))
            continue
        for kind in _DECODERS:
            for raw in getattr(packed, kind):
                _read_record(found, kind, bytes(raw))
    return found


def read_record(kind: str, body: bytes) -> OutboxBatch:
    """A batch of one record, or of a whole message where `kind` is empty; ValueError if unreadable."""
    found = read([body]) if not kind else Read()
    if kind:
        _read_record(found, kind, body)
    if found.unreadable:
        raise ValueError(found.unreadable[0].reason)
    return found.batch()


def encoded(record: object) -> bytes:
    return _encode(record)


def batch_of(records: Iterable[tuple[str, object]]) -> OutboxBatch:
    by_kind: dict[str, list[object]] = {kind: [] for kind in _DECODERS}
    for kind, record in records:
        by_kind[kind].append(record)
    return OutboxBatch(
        usage=by_kind[USAGE],  # type: ignore[arg-type]
        receipts=by_kind[RECEIPT],  # type: ignore[arg-type]
        moderation=by_kind[MODERATION],  # type: ignore[arg-type]
        lines=by_kind[LINE],  # type: ignore[arg-type]
    )


def _read_record(found: Read, kind: str, body: bytes) -> None:
    try:
        found.records.append((kind, _DECODERS[kind].decode(body)))
    except ValueError as error:
        found.unreadable.append(Unreadable(kind, body, str(error)))


def _by_tenant(batch: OutboxBatch) -> Iterator[tuple[str, str, object]]:
    """Tenant, kind and record. A receipt has the tenant of its event where the batch has both."""
    tenants = {event.request_id: event.tenant_id for event in batch.usage}
    for event in batch.usage:
        yield event.tenant_id, USAGE, event
    for count in batch.receipts:
        yield tenants.get(count.request_id.partition(".")[0], ""), RECEIPT, count
    for decision in batch.moderation:
        yield decision.tenant_id, MODERATION, decision
    for line in batch.lines:
        yield "", LINE, line


def _message(tenant_id: str, packed: _Packed) -> Message:
    body = _encode(packed)
    return Message(hashlib.blake2b(body, digest_size=16).hexdigest(), tenant_id, body)
