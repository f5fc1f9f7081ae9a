"""The part of an answer that the request's money covers."""

from gateway.admission.reservation import Reservation
from gateway.answers.chunks import take_tokens, tokens_of
from gateway.request.engine import Chunk


class Coverage:
    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self._tokens = 0  # of the answer so far
        self.exhausted = False  # the money did not cover all of the answer

    def restart(self) -> None:
        """Another replica starts the answer again."""
        self._tokens = 0

    def add(self, tokens: int) -> bool:
        """Whether the money that is held already covers so many tokens more; if so, they count."""
        total = self._tokens + tokens
        if total > self._reservation.covered:
            return False
        self._tokens = total
        return True

    async def cut(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks that the money covers; where it does not cover all, the answer fails after them.
        Raises DependencyDown when the counters do not answer."""
        arrived = sum([tokens_of(chunk) for chunk in chunks])
        if self.add(arrived):
            return chunks
        total = self._tokens + arrived
        if await self._reservation.extend(total):
            self._tokens = total
            return chunks
        self.exhausted = True
        return take_tokens(chunks, max(0, self._reservation.covered - self._tokens))


class FreeCoverage(Coverage):
    """Of an answer whose price does not depend on its tokens."""

    def add(self, tokens: int) -> bool:
        return True
