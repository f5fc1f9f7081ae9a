"""The receipts that end a generation: those of engines, and those of other servers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from msgspec.structs import astuple
from msgspec.structs import replace as replace_fields

from core.events import Components, CountedBy
from engine.protocol import WHOLE, Receipt

NO_PARTS = Components()


@dataclass(slots=True)
class UpstreamReceipt(Receipt):
    """A server's counts, in the form of an engine's receipt."""

    counted_by: CountedBy = CountedBy.ESTIMATE
    reasoning: int = 0  # of `generated`
    characters: int = 0  # of the reasoning, text and tool calls that the server sent
    silent: int = 0  # of `generated`: reasoning whose text the server kept
    parts: Components = NO_PARTS  # of `computed` and `generated`, as the server reported them

    def components(self, output: int) -> Components | None:
        """What the usage consists of where `output` tokens are billed. Of an answer that was not
        delivered whole, reasoning counts first: it is sent first."""
        if self.parts is NO_PARTS and not self.reasoning:
            return None
        found = replace_fields(self.parts, reasoning=self.reasoning).within(self.computed, output)
        return None if found == NO_PARTS else found

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
        every = [astuple(each.parts) for each in receipts if isinstance(each, UpstreamReceipt)]
        counts["parts"] = Components(*map(sum, zip(*every, strict=True)))
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
_TEXT_COUNTS = ("reasoning", "characters", "silent")
_INEXACTNESS = (CountedBy.UPSTREAM, CountedBy.TOKENIZER, CountedBy.ESTIMATE)
_TIMES = ("queue_s", "prefill_s", "decode_s")
