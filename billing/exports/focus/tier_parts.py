"""How the usage of a day divides among the price points of a rate: tiers, free units and packages.

The books have a quantity and an amount by day and key. Each part has one unit price, so that price
times quantity is its cost; the parts are chosen so that their costs sum to the booked amount. Where
the booked amount has another cause (usage rated late that moved a tier of another price version), the
parts are those of the position, and the amounts differ.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from billing.pricing.pricing import PPM, Rate, Scheme

STANDARD, FREE = "standard", "free"


@dataclass(frozen=True, slots=True)
class Point:
    """A price of a rate with a name that is stable over price versions."""

    name: str
    unit: int  # picounits for each that is priced, before a discount
    index: int  # among the rate's points
    package: int = 1  # units that one price pays for
    counted: bool = True  # False: the flat part of a tier, once when it is reached


@dataclass(frozen=True, slots=True)
class Part:
    point: Point
    quantity: int  # units that were used; below zero where a cheaper volume tier reprices them
    priced: int  # units, packages or entries that the price is multiplied by


def points_of(rate: Rate | None) -> tuple[Point, ...]:
    """The price points in the order in which a growing quantity reaches them; without a rate, free."""
    if rate is None:
        return (Point(STANDARD, 0, 0),)
    if rate.scheme is Scheme.PACKAGE:
        return (Point(f"package-{rate.package}", rate.tiers[0].unit, 0, rate.package),)
    free = [Point(FREE, 0, 0)] if rate.free else []
    if rate.scheme is Scheme.FLAT:
        return (*free, Point(STANDARD, rate.tiers[0].unit, len(free)))
    kind = "volume" if rate.scheme is Scheme.VOLUME else "tier"
    tiers = [
        Point(f"{kind}-{number}", tier.unit, len(free) + number - 1)
        for number, tier in enumerate(rate.tiers, 1)
    ]
    return (*free, *tiers)


def entry_of(rate: Rate, point: Point) -> Point | None:
    """The flat part that is charged when the tier of this point is reached; None without one."""
    tier = point.index - (1 if rate.free else 0)
    if rate.scheme is not Scheme.GRADUATED or tier < 0 or not rate.tiers[tier].flat:
        return None
    return Point(f"{point.name}-entry", rate.tiers[tier].flat, point.index, counted=False)


def parts_of(
    rate: Rate | None, discount_ppm: int, before: int, quantity: int, amount: int
) -> list[Part]:
    """Parts of `quantity` units that cost `amount` picounits; `before` others of the period are likely to
    precede them."""
    points = points_of(rate)
    if rate is None or (len(points) == 1 and rate.scheme is Scheme.FLAT):
        return [Part(points[0], quantity, quantity)]
    kept = PPM - discount_ppm
    if rate.scheme is Scheme.PACKAGE:
        price = points[0].unit * kept
        packages = (2 * amount * PPM + price) // (2 * price) if price else _packages(rate, quantity)
        return [Part(points[0], quantity, packages)]
    likely = _at_position(rate, points, before, quantity)
    if _agrees(likely, kept, quantity, amount):
        return likely
    if rate.scheme is Scheme.VOLUME:
        ways = _repriced(points, quantity, amount * PPM, kept)
    else:
        ways = _graduated(rate, points, (before, quantity), amount * PPM, kept)
    for parts in ways:
        if _agrees(parts, kept, quantity, amount):
            return parts
    return likely


def parts_at(rate: Rate | None, before: int, quantity: int) -> list[Part]:
    """Parts of `quantity` units after `before` others of the period."""
    points = points_of(rate)
    if rate is None or (len(points) == 1 and rate.scheme is Scheme.FLAT):
        return [Part(points[0], quantity, quantity)]
    if rate.scheme is Scheme.PACKAGE:
        begun = _packages(rate, before + quantity - rate.free)
        return [Part(points[0], quantity, begun - _packages(rate, before - rate.free))]
    return _at_position(rate, points, before, quantity)


def _packages(rate: Rate, quantity: int) -> int:
    return -(-max(0, quantity) // rate.package)


def _agrees(parts: list[Part], kept: int, quantity: int, amount: int) -> bool:
    """Whether the parts cost the amount. A discount leaves less than a picounit an event."""
    cost = sum(each.priced * each.point.unit for each in parts) * kept
    allowed = max(1, abs(quantity)) * PPM if kept != PPM else 0
    return abs(cost - amount * PPM) <= allowed


def _at_position(rate: Rate, points: tuple[Point, ...], before: int, quantity: int) -> list[Part]:
    """What the quantity costs at its position, in the order in which the tiers are reached."""
    if rate.scheme is Scheme.VOLUME:
        paid = max(0, before + quantity - rate.free) - max(0, before - rate.free)
        whole = max(0, before + quantity - rate.free)
        reached = next(i for i, t in enumerate(rate.tiers) if t.up_to is None or whole <= t.up_to)
        then = max(0, before - rate.free)
        first = next(i for i, t in enumerate(rate.tiers) if t.up_to is None or then <= t.up_to)
        shift = 1 if rate.free else 0
        counts = {points[0]: quantity - paid} if rate.free else {}
        counts[points[shift + reached]] = paid
        if first != reached and then:
            counts[points[shift + reached]] += then
            counts[points[shift + first]] = -then
        return _shown(counts)
    counts = {}
    entries: list[Part] = []
    for low, high, point in _ranges(rate, points):
        used = min(high, before + quantity) - max(low, before)
        if used > 0:
            counts[point] = used
            entry = entry_of(rate, point)
            if entry is not None and before <= low:
                entries.append(Part(entry, 0, 1))
    return _shown(counts, entries) or [Part(points[0], quantity, quantity)]


def _ranges(rate: Rate, points: tuple[Point, ...]) -> list[tuple[int, int, Point]]:
    """Above which and up to which quantity of the period each point prices."""
    tops = [rate.free] if rate.free else []
    tops += [rate.free + t.up_to if t.up_to is not None else 1 << 62 for t in rate.tiers]
    return [
        (low, high, point) for (low, high), point in zip(pairwise([0, *tops]), points, strict=True)
    ]


def _graduated(
    rate: Rate, points: tuple[Point, ...], used: tuple[int, int], amount: int, kept: int
) -> Iterator[list[Part]]:
    """Ways to divide a quantity over adjacent tiers: those between the first and the last are full.
    Those near the day's position are the likeliest: keys that use the same day reach a tier in an
    order that is not known, and what comes late is further up."""
    ranges = _ranges(rate, points)
    before, quantity = used
    of_day = next((i for i, (_, high, _) in enumerate(ranges) if before < high), 0)
    spans = [(first, first + width) for width in range(len(ranges)) for first in range(len(ranges))]
    for first, last in sorted(spans, key=_likeliest(of_day)):
        if last >= len(ranges):
            continue
        inner = [(high - low, point) for low, high, point in ranges[first + 1 : last]]
        left = quantity - sum(width for width, _ in inner)
        for enters in (False, True):
            reached = ranges[first : last + 1] if enters else ranges[first + 1 : last + 1]
            found = (entry_of(rate, point) for _, _, point in reached)
            entries = [Part(each, 0, 1) for each in found if each is not None]
            rest = amount - kept * sum(
                [width * point.unit for width, point in inner]
                + [each.point.unit for each in entries]
            )
            low, high = ranges[first][2], ranges[last][2]
            step = (high.unit - low.unit) * kept
            upper = (2 * (rest - left * low.unit * kept) + step) // (2 * step) if step else 0
            if left >= 0 and 0 <= upper <= left:
                counts = {low: left - upper, **{p: width for width, p in inner}}
                counts[high] = counts.get(high, 0) + upper
                yield _shown(counts, entries)


def _likeliest(of_day: int) -> Callable[[tuple[int, int]], tuple[int, int, bool]]:
    """Few tiers before many, the nearest to that of the day first, and of those the later."""

    def _order(span: tuple[int, int]) -> tuple[int, int, bool]:
        first, last = span
        away = max(0, first - of_day, of_day - last)
        return last - first, away, first < of_day

    return _order


def _repriced(
    points: tuple[Point, ...], quantity: int, amount: int, kept: int
) -> Iterator[list[Part]]:
    """Ways in which a quantity reaches a cheaper volume tier: what was used before is priced again."""
    tiers = [each for each in points if each.name != FREE]
    for reached in tiers:
        if quantity * reached.unit * kept == amount:
            yield _shown({reached: quantity})
    for high in tiers:
        for low in tiers[: tiers.index(high)]:
            step = (high.unit - low.unit) * kept
            left = amount - quantity * high.unit * kept
            if step and left % step == 0 and left // step >= 0:
                again = left // step
                yield _shown({high: quantity + again, low: -again})


def _shown(counts: dict[Point, int], entries: list[Part] | None = None) -> list[Part]:
    return [Part(point, count, count) for point, count in counts.items() if count] + (entries or [])
