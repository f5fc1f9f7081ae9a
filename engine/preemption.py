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

    def finish_s(self, seq: Sequence) -> float:
        """Seconds until the sequence ends if it goes on: a token a step."""
        room = seq.request.limit - len(seq.history)
        return min(seq.request.ask.sampling.max_tokens - seq.output_len, room) * self.step_s

    def again_s(self, seq: Sequence) -> float:
        """Seconds to compute the sequence's history anew."""
        return len(seq.history) / self.tokens * self.step_s


def choose_victim(running: list[Sequence], waiting: Waiting, pace: Pace, now: float) -> Sequence:
    """The lowest priority, then the most served tenant, then the latest arrival; one that would
    miss its deadline by starting again only when there is no other."""
    if not running:
        raise IntegrityError("memory is short and nothing runs")
    # A victim comes back when somebody has ended.
    away_s = min(pace.finish_s(seq) for seq in running)

    def last_chance(seq: Sequence) -> bool:
        deadline = seq.request.deadline
        if deadline is None:
            return False
        return now + away_s + pace.again_s(seq) + pace.finish_s(seq) > deadline

    def rank(seq: Sequence) -> tuple[bool, int, float, float, int]:
        behind, served, arrived = waiting.turn(seq)
        return (not last_chance(seq), behind, served, arrived, seq.number)

    return max(running, key=rank)
