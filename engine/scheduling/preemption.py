"""Chooses the sequence to preempt when memory is short, and estimates the time to redo it."""

from engine.errors import IntegrityError
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting import WaitingQueue

MIN_BUDGET = 32  # tokens: a step of fewer costs about as much as one of these
FIRST_BUDGET = 128  # tokens in a step before one was measured


class StepTiming:
    """Running averages of the step time and of the tokens in a step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.tokens = 1.0
        self.token_s: float | None = None  # of steps with prompt chunks; None: not measured yet

    def budget(self, aim_s: float, most: int) -> int:
        """Tokens that take about `aim_s` seconds, at least MIN_BUDGET and at most `most`."""
        if not aim_s:
            return most
        if self.token_s is None:
            return min(most, FIRST_BUDGET)
        fitting = int(min(most, aim_s / self.token_s)) if self.token_s else most
        return min(most, max(MIN_BUDGET, fitting))

    def record(self, step_s: float, tokens: int) -> None:
        # A step of few tokens reads the same weights, so it says little of a token's cost.
        if tokens >= MIN_BUDGET:
            token_s = step_s / tokens
            self.token_s = (
                token_s if self.token_s is None else self.token_s + 0.3 * (token_s - self.token_s)
            )
        if self.step_s == 0.0:
            self.step_s, self.tokens = step_s, float(max(1, tokens))
            return
        self.step_s += 0.1 * (step_s - self.step_s)
        self.tokens += 0.1 * (tokens - self.tokens)

    def remaining_s(self, seq: Sequence) -> float:
        """Seconds until the sequence ends if it continues, at one token per step."""
        left = seq.request.limit - len(seq.history)
        return min(seq.request.inputs.sampling.max_tokens - seq.output_len, left) * self.step_s

    def recompute_s(self, seq: Sequence) -> float:
        """Seconds to recompute the sequence's history."""
        return len(seq.history) / self.tokens * self.step_s


def choose_victim(
    running: list[Sequence], waiting: WaitingQueue, timing: StepTiming, now: float
) -> Sequence:
    """The sequence of the lowest priority, then of the most served tenant, then the latest arrival.
    A sequence that would miss its deadline by starting again is chosen only if there is no other.
    """
    if not running:
        raise IntegrityError("memory is short and no sequence is running")
    # A victim is admitted again, at the earliest, when a running sequence has ended.
    wait_s = min(timing.remaining_s(seq) for seq in running)

    def would_miss_deadline(seq: Sequence) -> bool:
        deadline = seq.request.deadline
        if deadline is None:
            return False
        return now + wait_s + timing.recompute_s(seq) + timing.remaining_s(seq) > deadline

    def rank(seq: Sequence) -> tuple[bool, int, float, float, int]:
        priority_key, served, arrived = waiting.sort_key(seq)
        return (not would_miss_deadline(seq), priority_key, served, arrived, seq.number)

    return max(running, key=rank)
