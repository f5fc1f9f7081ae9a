"""A re-rating as FOCUS shows it: what was charged is reversed and entered again, by day, key and SKU
price.

The adjustment of a line is the difference. Where the days of the re-rated usage are not known, as when
a re-rating begins inside a day, the line is one row without a SKU.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

from billing.exports.focus.inputs import SLOT, Day, DayKey, Inputs
from billing.exports.focus.pieces import Piece, of_parts
from billing.exports.focus.tier_parts import parts_at, parts_of
from billing.invoicing.tables import InvoiceLine
from billing.pricing.pricing import Component
from billing.rating.tables import Rerate
from billing.rating.tiers import ONLY

_DAY = timedelta(days=1)


def is_shown(inputs: Inputs, line: InvoiceLine, bill_period: str) -> bool:
    """Whether its usage is shown by day."""
    return line.kind == "adjustment" and bool(_days(inputs, line, bill_period))


def pieces(inputs: Inputs, line: InvoiceLine, bill_period: str) -> list[Piece]:
    """Reversals and new entries, which sum to the exact amount of the line; none where its days are not
    known."""
    days = _days(inputs, line, bill_period)
    if not days:
        return []
    rerate = inputs.rerates[str(line.details["rerate"])]
    component = Component(line.component)
    right = inputs.book.by_id[rerate.to_version]
    found: list[Piece] = []
    used: dict[str, int] = defaultdict(int)  # units so far, by version that was in force
    entered = 0
    for key, day in days:
        quantity, booked = day.sums[SLOT[line.component]], day.sums[SLOT[line.component] + 1]
        before = _version_before(inputs, rerate, day)
        wrong = inputs.book.by_id[before]
        what = (line.model, key[4], component)
        plain = Piece(day.at, day.at + _DAY, day.key_id, labels=day.labels)
        rate, discount = wrong.rates.get(component), wrong.discount_ppm
        if before == rerate.from_version:
            at = inputs.before(key, component, day)
            parts = parts_of(rate, discount, at, quantity, booked)
        else:
            parts = parts_at(rate, used[before], quantity)
            used[before] += quantity
        old = of_parts(inputs.listed, what, wrong, replace(plain, version=before), parts)
        again = parts_at(right.rates.get(component), entered, quantity)
        entered += quantity
        found += [_opposite(each) for each in old]
        found += of_parts(inputs.listed, what, right, replace(plain, version=right.id), again)
    rest = line.exact - sum(each.exact for each in found)
    found[-1] = replace(found[-1], exact=found[-1].exact + rest)
    return found


def _opposite(piece: Piece) -> Piece:
    return replace(
        piece,
        consumed=-(piece.consumed or 0),
        quantity=-(piece.quantity or 0),
        exact=-piece.exact,
    )


def _days(inputs: Inputs, line: InvoiceLine, bill_period: str) -> list[tuple[DayKey, Day]]:
    """The re-rated days in order, if they have all of the usage that the line is about. What is billed
    later than the line was not re-rated."""
    rerate = inputs.rerates.get(str(line.details.get("rerate")))
    if rerate is None or not line.component:
        return []
    billed = inputs.billed_from[bill_period]
    found = [
        (key, day)
        for key, day in _matching(inputs, line, rerate)
        if inputs.billed_from[key[0]] <= billed
    ]
    at = SLOT[line.component]
    if sum(day.sums[at] for _, day in found) != line.quantity:
        return []
    return sorted(found, key=lambda each: (each[1].at, each[0], each[1].key_id, each[1].labels))


def _matching(inputs: Inputs, line: InvoiceLine, rerate: Rerate) -> Iterator[tuple[DayKey, Day]]:
    component = Component(line.component)
    for key in inputs.rerated.get(line.usage_period_id, ()):
        _, _, project_id, model, _, version, kind = key
        same = (project_id, model, version) == (line.project_id, line.model, rerate.from_version)
        if not same or ONLY.get(kind, component) is not component:
            continue
        for day in inputs.days[key]:
            inside = rerate.starts_at < day.at + _DAY and day.at < rerate.ends_at
            if inside and day.sums[SLOT[line.component]]:
                yield key, day


def _version_before(inputs: Inputs, rerate: Rerate, day: Day) -> str:
    """The version by which the day was charged before this re-rating."""
    earlier = [
        each
        for each in inputs.rerates.values()
        if each.from_version == rerate.from_version
        and (each.posted_at, each.id) < (rerate.posted_at, rerate.id)
        and each.tenant_id in ("", rerate.tenant_id)
        and each.starts_at <= day.at < each.ends_at
    ]
    last = max(earlier, key=lambda each: (each.posted_at, each.id), default=None)
    return last.to_version if last is not None else rerate.from_version
