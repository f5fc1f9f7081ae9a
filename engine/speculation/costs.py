"""What a decoding step of so many tokens takes, from the steps that ran."""

from itertools import pairwise
from math import inf

_STALE = 256  # steps after which a measurement is dropped
_DOUBTED = 16  # the same for the first `_SURE` of a size, which may contain work that is done once
_SURE = 3
_NEW = 0.25  # the weight of a new measurement

_Point = tuple[float, float, int, int]  # tokens, seconds, number of the step, how many steps


class StepCosts:
    """Keeps an average for each doubling of the tokens, and interpolates."""

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        self._steps = 0

    def record(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        size = (tokens - 1).bit_length()
        old = self._points.get(size)
        if old is None or self._is_stale(old):
            count = 1 if old is None else old[3] + 1
            self._points[size] = float(tokens), seconds, self._steps, count
            return
        seconds = min(seconds, 4 * old[1])  # one step that the machine interrupted says little
        mean = old[0] + _NEW * (tokens - old[0]), old[1] + _NEW * (seconds - old[1])
        self._points[size] = (*mean, self._steps, old[3] + 1)

    def measured(self, tokens: int) -> bool:
        """Whether steps of about so many tokens ran lately."""
        point = self._points.get((tokens - 1).bit_length())
        return point is not None and not self._is_stale(point)

    def age(self, tokens: int) -> int:
        """Steps since one of about so many tokens ran."""
        point = self._points.get((tokens - 1).bit_length())
        return self._steps if point is None else self._steps - point[2]

    def curve(self, token_s: float | None) -> list[tuple[float, float]]:
        """Points (tokens, seconds), rising: where two measurements contradict each other, as they do
        when the machine has become faster or slower in between, the newer one counts. token_s: what
        a token of a prompt takes, if known; it gives the slope beyond the last point."""
        points = [each for each in self._points.values() if not self._is_stale(each)]
        found: dict[float, float] = {}
        for tokens, seconds, _, _ in sorted(points, key=lambda point: -point[2]):
            low = max((s for n, s in found.items() if n < tokens), default=0.0)
            high = min((s for n, s in found.items() if n > tokens), default=inf)
            found[tokens] = min(max(seconds, low), high)
        rising = sorted(found.items())
        last, seconds = rising[-1]
        slope = seconds / max(16.0, 2 * last) if token_s is None else token_s
        return [*rising, (last + 1024, seconds + 1024 * slope)]

    def _is_stale(self, point: _Point) -> bool:
        return self._steps - point[2] > (_STALE if point[3] >= _SURE else _DOUBTED)


def seconds_of(curve: list[tuple[float, float]], tokens: int) -> float:
    """Interpolated; below the first point along its own slope."""
    for (a, at_a), (b, at_b) in pairwise(curve):
        if tokens <= b:
            return max(at_a / 2, at_a + (tokens - a) * (at_b - at_a) / max(b - a, 1e-9))
    return curve[-1][1]


def bends_of(curve: list[tuple[float, float]]) -> list[float]:
    """The tokens between which `seconds_of` is a straight line."""
    (a, at_a), (b, at_b) = curve[:2]
    slope = (at_b - at_a) / max(b - a, 1e-9)
    low = [a - at_a / 2 / slope] if slope > 0 else []
    return [*low, *(tokens for tokens, _ in curve)]
