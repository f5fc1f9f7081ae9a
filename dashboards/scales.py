"""Scales of charts: rounded axis ticks, positions and labels."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

Number = int | float


@dataclass(frozen=True, slots=True)
class Axis:
    top: float  # the axis runs from `low` to `top`
    ticks: tuple[float, ...]
    low: float = 0.0  # at most 0

    def position(self, value: Number, length: float) -> float:
        """Distance from the bottom of the axis."""
        whole = self.top - self.low
        return (float(value) - self.low) / whole * length if whole else 0.0


def axis_for(highest: Number, lowest: Number = 0, steps: int = 4) -> Axis:
    """Ticks at 1, 2, 2.5 or 5 times a power of ten, through 0, around the highest and the lowest value.
    Without a value other than 0, the only tick is 0."""
    highest, lowest = max(0, highest), min(0, lowest)
    if highest == lowest:
        return Axis(1.0, (0.0,))
    rough = Decimal(str(float(highest - lowest))) / steps
    power = Decimal(10) ** rough.adjusted()
    step = next(power * m for m in _MULTIPLES if power * m >= rough)
    ticks = [Decimal(0)]
    while ticks[-1] < Decimal(str(float(highest))):
        ticks.append(ticks[-1] + step)
    while ticks[0] > Decimal(str(float(lowest))):
        ticks.insert(0, ticks[0] - step)
    return Axis(float(ticks[-1]), tuple(float(tick) for tick in ticks), float(ticks[0]))


_MULTIPLES = tuple(Decimal(m) for m in ("1", "2", "2.5", "5", "10"))


def short(value: Number) -> str:
    """`1234567` -> `1.23 M`, for axes and tiles; tables show the exact number."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g} {unit}"
    if not isinstance(value, float):
        return str(value)
    rounded = Decimal(f"{value:.3g}").normalize()
    return f"{rounded:f}"  # 0.00005, which `g` writes as 5e-05


def grouped(value: int) -> str:
    """Digits in groups of three, separated by a narrow no-break space as the SI recommends."""
    return f"{value:,}".replace(",", "\u202f")


Label = Callable[[Number], str]


def count_of(noun: str) -> Label:
    """`1 token`, `1 234 567 tokens`."""

    def _said(value: Number) -> str:
        return f"{grouped(int(value))} {noun}{'' if value == 1 else 's'}"

    return _said
