"""Which blocks of a prompt stay for its answer, in addition to the first and the last positions (SnapKV).

After SnapKV (arXiv 2404.14469): the prompt's last queries see all of it, and what attention they give
to each position says what the answer will read. Here whole blocks are chosen, because a block holds all
layers and heads, and once, so that what a position sees depends on the prompt alone: not on how it was
cut, on preemption or on guesses. (H2O, arXiv 2306.14048, goes on choosing while it answers.)
"""

from dataclasses import dataclass

from engine.batch import AnswerSight
from engine.config import EngineConfig
from engine.model_spec import Sight
from engine.scheduling.sequence import Request, Sequence

OBSERVED = 64  # the last positions of a prompt whose attention counts


@dataclass(frozen=True, slots=True)
class Eviction:
    sight: Sight  # of answers, in addition to the kept blocks
    blocks: int  # that stay
    block_size: int

    def begin(self, request: Request) -> None:
        """Where all that the sight leaves out stays, nothing is to be observed."""
        unseen = self._unseen(len(request.inputs.prompt))
        if len(unseen) <= self.blocks:
            request.heavy = tuple(unseen)

    def observed(self, seq: Sequence) -> int | None:
        """See `Row.observed`."""
        if seq.request.heavy is not None or not seq.request.inputs.sampling.max_tokens:
            return None
        return max(0, seq.prompt_len - OBSERVED)

    def choosing(self, running: list[Sequence]) -> bool:
        """Whether a prompt's blocks are chosen by a step whose results are not there yet."""
        return any(seq.pending and seq.request.heavy is None for seq in running)

    def choose(self, request: Request, attention: list[float]) -> None:
        """The blocks with most attention; of equal ones the first."""
        unseen = self._unseen(len(request.inputs.prompt))
        ranked = sorted(unseen, key=lambda number: -attention[number])
        request.heavy = tuple(sorted(ranked[: self.blocks]))

    def answer_of(self, request: Request) -> AnswerSight | None:
        """None until the blocks are chosen."""
        if request.heavy is None:
            return None
        return AnswerSight(len(request.inputs.prompt), self.sight, request.heavy)

    def unread_blocks(self, seq: Sequence, position: int) -> range:
        """Those that no query from `position` on sees, but for the ones that stay."""
        if seq.request.heavy is None or position < seq.prompt_len:
            return range(0)
        return self.sight.unread_blocks(position, self.block_size)

    def most_cached(self, seq: Sequence) -> int:
        """How many leading blocks may come from the prefix cache: those before the queries that are
        observed, and none of an answer, whose own did not see all."""
        observed = self.observed(seq)
        return (seq.prompt_len if observed is None else observed) // self.block_size

    def _unseen(self, prompt: int) -> range:
        return self.sight.unread_blocks(prompt, self.block_size)


def eviction_of(config: EngineConfig) -> Eviction | None:
    if not config.kv_heavy:
        return None
    return Eviction(config.kv_sight, config.kv_heavy // config.block_size, config.block_size)
