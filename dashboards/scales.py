"""Scales of charts: rounded axis ticks, positions and labels."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

Number = int | float


@dataclass(frozen=True, slots=True)
class Axis:
    top: float  # the axis runs from 0 to `top`
    ticks: tuple[float, ...]

    def position(self, value: Number, length: float) -> float:
        """Distance from the bottom of the axis."""
        return float(value) / self.top * length if self.top else 0.0


def axis_for(highest: Number, steps: int = 4) -> Axis:
    """Ticks at 1, 2, 2.5 or 5 times a power of ten, the last at or above the highest value."""
    if highest <= 0:
        return Axis(1.0, (0.0, 1.0))
    rough = Decimal(str(float(highest))) / steps
    power = Decimal(10) ** rough.adjusted()
    step = next(power * m for m in _MULTIPLES if power * m >= rough)
    ticks = [Decimal(0)]
    while ticks[-1] < Decimal(str(float(highest))):
        ticks.append(ticks[-1] + step)
    return Axis(float(ticks[-1]), tuple(float(tick) for tick in ticks))


_MULTIPLES = tuple(Decimal(m) for m in ("1", "2", "2.5", "5", "10"))


def short(value: Number) -> str:
    """`1234567` -> `1.23 M`, for axes and tiles; tables show the exact number."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def grouped(value: int) -> str:
    """Digits in groups of three, separated by a narrow no-break space as the SI recommends."""
    return f"{value:,}".replace(",", "\u202f")


Label = Callable[[Number], str]
