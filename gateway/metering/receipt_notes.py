"""What a usage event needs beyond the receipt's own fields: sent with the request, and kept by the
engine in the receipt. The engine does not read it."""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from core.events import OpenedRequest, UsageKind
from core.ids import moment_of
from engine.protocol import Receipt


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
