"""Who gives its blocks back when memory is short, and how long its work takes to redo."""

from engine.errors import IntegrityError
from engine.sequence import Sequence
from engine.waiting import Waiting


class Pace:
    """Running averages of the step time and of the tokens in a step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.tokens = 1.0

    def note(self, step_s: float, tokens: int) -> None:
        if self.step_s == 0.0:
            self.step_s, self.tokens = step_s, float(max(1, tokens))
            return
        self.step_s += 0.1 * (step_s - self.step_s)
        self.tokens += 0.1 * (tokens - self.tokens)

    def needed_s(self, seq: Sequence) -> float:
        """Seconds to compute the sequence anew and to finish it: a step a token, roughly."""
        ask = seq.request.ask
        to_come = min(ask.sampling.max_tokens - seq.output_len, seq.request.limit)
        return (len(seq.history) / self.tokens + to_come) * self.step_s


def choose_victim(running: list[Sequence], waiting: Waiting, pace: Pace, now: float) -> Sequence:
    """The lowest priority, then the most served tenant, then the latest arrival; one that would
    miss its deadline by starting again only when there is no other."""

    def last_chance(seq: Sequence) -> bool:
        deadline = seq.request.deadline
        return deadline is not None and now + pace.needed_s(seq) > deadline

    def rank(seq: Sequence) -> tuple[bool, int, float, float, int]:
        behind, served, arrived = waiting.turn(seq)
        return (not last_chance(seq), behind, served, arrived, seq.number)

    if not running:
        raise IntegrityError("memory is short and nothing runs")
    return max(running, key=rank)
