"""What the gateway reads of an engine's receipt, and its way to the spool.

Receipts go from the engine's message straight to the spool, independently of request and meter: the
audit compares them with usage events, and a usage event that is lost, duplicated or wrong does not
affect its receipt.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from core.clock import Clock
from core.events import EngineCount, OpenedRequest, UsageKind
from core.ids import moment_of
from engine.protocol import Receipt
from gateway.metering.spool import Spool


class ReceiptNote(msgspec.Struct, frozen=True, array_like=True):
    project_id: str
    key_id: str
    model: str  # public name of the base model
    adapter: str | None  # public name of the adapter
    price_version: str
    route: str
    kind: UsageKind
    member_id: str | None
    batch_job: str | None
    prompts: int


_GENERATION = UsageKind.GENERATION
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ReceiptNote).decode


@lru_cache(maxsize=4_096)
def note_text(*fields: Any) -> str:
    """Requests of one key for one model have the same, unless they are of a batch."""
    return _encode(ReceiptNote(*fields)).decode()


def opened_of(request_id: str, receipts: list[Receipt], engine_id: str) -> OpenedRequest | None:
    """The request of these receipts as it was opened; None if they name no payer. `request_id` is
    the gateway's: the engine knows several prompts each under its own id."""
    first = receipts[0]
    try:
        note, opened_at = _decode(first.note.encode()), moment_of(request_id)
    except (msgspec.MsgspecError, ValueError):
        return None
    return OpenedRequest(
        request_id=request_id,
        tenant_id=first.namespace,
        project_id=note.project_id,
        key_id=note.key_id,
        kind=note.kind,
        route=note.route,
        model=note.model,
        adapter=note.adapter,
        adapter_digest=first.adapter,
        price_version=note.price_version,
        opened_at=datetime.fromtimestamp(opened_at / 1000, UTC),
        prompt_tokens=sum(each.prompt + each.unprocessed for each in receipts),
        engine_id=engine_id,
        member_id=note.member_id,
        batch_job=note.batch_job,
        prompts=note.prompts,
    )


GUARD_NAMESPACE = "tollhouse:guard"  # requests of guard models: ours, and no usage event follows


class ReceiptLog:
    def __init__(self, spool: Spool, clock: Clock) -> None:
        self._spool = spool
        self._clock = clock

    def arrived(
        self, engine_id: str, receipt: Receipt, on_durable: Callable[[], None] | None = None
    ) -> None:
        """Spool the counts of a receipt. Called in the event loop, once for each arrival."""
        if receipt.namespace == GUARD_NAMESPACE:
            if on_durable is not None:
                on_durable()
            return
        self._spool.note_receipt(engine_count(engine_id, receipt, self._clock.now()), on_durable)


def engine_count(engine_id: str, receipt: Receipt, now: datetime) -> EngineCount:
    counts = (receipt.prompt, receipt.cached, receipt.generated)
    return EngineCount(receipt.request_id, engine_id, *counts, now, receipt.busy_us)
