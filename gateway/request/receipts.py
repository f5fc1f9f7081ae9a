"""The receipts that end a generation: those of engines, and those of other servers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from core.events import CountedBy
from engine.protocol import WHOLE, Receipt


@dataclass(frozen=True, slots=True)
class UpstreamReceipt(Receipt):
    """A server's counts, in the form of an engine's receipt."""

    counted_by: CountedBy = CountedBy.ESTIMATE
    reasoning: int = 0  # of `generated`
    characters: int = 0  # of the reasoning, text and tool calls that the server sent
    silent: int = 0  # of `generated`: reasoning whose text the server kept
    cache_write: int = 0  # of `computed`: kept in the provider's cache for its usual time
    cache_write_long: int = 0  # of `computed`: kept for an hour
    searches: int = 0  # of the web, by the provider's own tool

    def billed(self, delivered: int, *, answered: bool) -> int:
        """Tokens to bill when `delivered` characters reached the client. `answered`: the request
        ended with an answer, which may consist of reasoning alone."""
        if delivered >= self.characters:
            return self.generated if delivered or answered else 0
        if not delivered:
            return 0
        visible = self.generated - self.silent
        return self.silent + visible * delivered // self.characters


Of = TypeVar("Of", bound=Receipt)


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
    merged: Of = replace(
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
_TEXT_COUNTS = (
    *("reasoning", "characters", "silent"),
    *("cache_write", "cache_write_long", "searches"),
)
_INEXACTNESS = (CountedBy.UPSTREAM, CountedBy.TOKENIZER, CountedBy.ESTIMATE)
_TIMES = ("queue_s", "prefill_s", "decode_s")
