"""Whether a draft model is worth its time in a step, and for which sequences.

By the share of its guesses that proved right for each sequence, the measured time of its own steps and
that of the served model's.
"""

from engine.speculation.costs import seconds_of

_MOST = 6  # guesses of a sequence in a step
_PRIOR, _WEIGHT = (
    0.7,
    4.0,
)  # the share of right guesses before there are any, and its weight in guesses
_KEPT = 0.95  # of the earlier guesses at each new one
_RETURN = 0.002  # by which a sequence that does not draft comes back to the prior, each step
_GAIN = 1.05  # by which a step with guesses must be better


class Acceptance:
    """The share of the draft model's guesses that proved right, of one sequence."""

    def __init__(self) -> None:
        self._right, self._tried = _PRIOR * _WEIGHT, _WEIGHT

    @property
    def share(self) -> float:
        return self._right / self._tried

    def record(self, right: int, drafts: int) -> None:
        """After the first wrong guess the others say nothing."""
        for n in range(min(right + 1, drafts)):
            self._right = _KEPT * self._right + (n < right)
            self._tried = _KEPT * self._tried + 1

    def rest(self, steps: int) -> None:
        """The sequence has not drafted in these steps: perhaps its text has become easier."""
        self._right += (1 - (1 - _RETURN) ** steps) * (_PRIOR * self._tried - self._right)


def best_drafts(
    shares: list[float],
    rows: int,
    room: int,
    curve: list[tuple[float, float]],
    step_s: float,
) -> tuple[int, int]:
    """(sequences, guesses of each) that give most tokens a second; (0, 0) where none are worth it.

    shares: of the sequences that may draft, the highest first. rows: of the step, without guesses.
    """
    plain = rows / max(seconds_of(curve, rows), 1e-9)
    best, best_rate = (0, 0), _GAIN * plain
    sizes = {1 << n for n in range(len(shares).bit_length())} | {len(shares)}
    for size in sorted(each for each in sizes if each <= len(shares)):
        likely, expected = [1.0] * size, float(rows)
        for count in range(1, _MOST + 1):
            if size * count > room:
                break
            likely = [each * share for each, share in zip(likely, shares, strict=False)]
            expected += sum(likely)
            seconds = seconds_of(curve, rows + size * count) + count * step_s
            if expected / max(seconds, 1e-9) > best_rate:
                best, best_rate = (size, count), expected / seconds
    return best
