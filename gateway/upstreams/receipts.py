"""The receipts that end a generation: those of engines, and those of other servers."""

from msgspec import Struct

from core.events import CountedBy
from engine.protocol import FinishReason, Receipt


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
