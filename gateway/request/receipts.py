"""The receipts that end a generation: those of engines, and those of other servers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from core.events import CountedBy
from engine.protocol import WHOLE, FinishReason, Receipt


class UpstreamReceipt(Struct, frozen=True):
    """A server's counts, with the fields of an engine's receipt. It is a struct of its own, since a
    frozen dataclass of so many fields takes fifteen times as long to make."""

    request_id: str
    namespace: str
    adapter: str | None
    prompt: int
    cached: int
    computed: int
    unprocessed: int
    generated: int
    delivered: int
    recomputed: int
    discarded: int
    finish_reason: FinishReason
    queue_s: float
    prefill_s: float
    decode_s: float
    message: str = ""
    rejected: int = 0
    accepted: int = 0
    note: str = ""
    busy_us: int = 0
    dropped: int = 0
    counted_by: CountedBy = CountedBy.ESTIMATE
    reasoning: int = 0  # of `generated`
    characters: int = 0  # of the reasoning, text and tool calls that the server sent
    silent: int = 0  # of `generated`: reasoning whose text the server kept

    def billed(self, delivered: int, *, answered: bool) -> int:
        """Tokens to bill when `delivered` characters reached the client. `answered`: the request
        ended with an answer, which may consist of reasoning alone."""
        if delivered >= self.characters:
            return self.generated if delivered or answered else 0
        if not delivered:
            return 0
        visible = self.generated - self.silent
        return self.silent + visible * delivered // self.characters


AnyReceipt = Receipt | UpstreamReceipt


Of = TypeVar("Of", bound=AnyReceipt)


def merged_receipt(request_id: str, receipts: Sequence[Of]) -> Of:
    """Merge receipts: the sum of the tokens, the longest time (the parts ran in parallel), and the
    first finish reason other than stop or length."""
    first = receipts[0]
    broken = [each for each in receipts if each.finish_reason not in WHOLE]
    names = _TOKENS + _TEXT_COUNTS if isinstance(first, UpstreamReceipt) else _TOKENS
    counts: dict[str, Any] = {name: sum(getattr(each, name) for each in receipts) for name in names}
    if isinstance(first, UpstreamReceipt):
        ways = [each.counted_by for each in receipts if isinstance(each, UpstreamReceipt)]
        counts["counted_by"] = max(ways, key=_INEXACTNESS.index)
    times: dict[str, Any] = {name: max(getattr(each, name) for each in receipts) for name in _TIMES}
    changed_by: Any = dataclasses.replace
    if isinstance(first, UpstreamReceipt):
        changed_by = msgspec.structs.replace
    merged: Of = changed_by(
        first,
        request_id=request_id,
        finish_reason=(broken or [first])[0].finish_reason,
        message=next((each.message for each in receipts if each.message), ""),
        **counts,
        **times,
    )
    return merged


_TOKENS = (
    "prompt",
    "cached",
    "computed",
    "unprocessed",
    "generated",
    "delivered",
    "recomputed",
    "discarded",
    "busy_us",
    "dropped",
)
_TEXT_COUNTS = ("reasoning", "characters", "silent")
_INEXACTNESS = (CountedBy.UPSTREAM, CountedBy.TOKENIZER, CountedBy.ESTIMATE)
_TIMES = ("queue_s", "prefill_s", "decode_s")
