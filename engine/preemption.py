"""Chooses the sequence to preempt when memory is short, and estimates the time to redo it."""

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
        """Seconds until the sequence ends if it continues, at one token per step."""
        room = seq.request.limit - len(seq.history)
        return min(seq.request.ask.sampling.max_tokens - seq.output_len, room) * self.step_s

    def again_s(self, seq: Sequence) -> float:
        """Seconds to recompute the sequence's history."""
        return len(seq.history) / self.tokens * self.step_s


def choose_victim(running: list[Sequence], waiting: Waiting, pace: Pace, now: float) -> Sequence:
    """The sequence of the lowest priority, then of the most served tenant, then the latest arrival.
    A sequence that would miss its deadline by starting again is chosen only if there is no other.
    """
    if not running:
        raise IntegrityError("memory is short and no sequence is running")
    # A victim is admitted again, at the earliest, when a running sequence has ended.
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
