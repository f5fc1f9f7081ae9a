"""Exact lines for the fees of subscriptions and their add-ons.

Fees by the month in arrears are those of the period. Fees in advance are those of the next period, with
what has changed since they were billed; fees by the year are due where a year begins or ends. What an
earlier invoice billed for the same time is subtracted, so that a cancellation returns the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from billing.invoice_inputs import BilledFee, InvoiceInputs
from billing.invoice_lines import Line
from billing.models import BillingAccount, BillingPeriod, Plan, Subscription
from billing.periods import period_around
from billing.subscriptions import MONTH, YEAR, AddOns, Segment, anniversary, segment
from core.money import round_to_minor

Held = Sequence[tuple[Subscription, Plan]]
_MICRO = timedelta(microseconds=1)


class _Fee(NamedTuple):
    kind: str
    units: int  # per interval
    quantity: int
    unit: str
    text: str


@dataclass(frozen=True, slots=True)
class Term:
    """Fees over the time in which they are owed: those of a subscription, or of an add-on while both
    run. Years are those of the subscription."""

    subscription: Subscription
    plan: Plan
    starts_at: datetime
    ends_at: datetime | None
    fees: tuple[_Fee, ...]
    details: dict[str, Any]  # on its lines
    holding: int = 0  # id of the add-on's row

    def part(self, starts_at: datetime, ends_at: datetime) -> Segment | None:
        owed = self.starts_at, self.ends_at or ends_at
        return segment(self.subscription, self.plan, owed, (starts_at, ends_at))

    def billed(self, inputs: InvoiceInputs, fee: _Fee, before: datetime) -> list[BilledFee]:
        return inputs.fees_before(self.subscription.id, fee.kind, self.holding, before)


def terms(held: Held, add_ons: AddOns) -> list[Term]:
    found = []
    for subscription, plan in held:
        details = {
            "plan": subscription.plan_id,
            "seats": subscription.seats,
            "subscription": subscription.id,
        }
        starts, ends = subscription.fees_from, subscription.ends_at
        fees = _fees(plan, subscription.seats)
        found.append(Term(subscription, plan, starts, ends, fees, details))
        for holding, add_on in add_ons:
            owed_from = max(starts, holding.starts_at)
            until = min((each for each in (ends, holding.ends_at) if each), default=None)
            if add_on.interval != plan.interval or (until is not None and until <= owed_from):
                continue
            text = f"Add-on {add_on.name}"
            text += f", {holding.quantity} units" if holding.quantity > 1 else ""
            units = add_on.fee * holding.quantity
            fee = _Fee("add_on", units, holding.quantity, "units", text)
            own = details | {"add_on": add_on.id, "holding": holding.id}
            found.append(Term(subscription, plan, owed_from, until, (fee,), own, holding.id))
    return found


def monthly(owed: Sequence[Term], period: BillingPeriod, currency: str) -> list[Line]:
    """Fees by the month in arrears, of each part of the period."""
    found = []
    for term in owed:
        part = term.part(period.starts_at, period.ends_at)
        if part is not None and term.plan.interval == MONTH and not term.plan.in_advance:
            found += [_fee_line(fee, part, term, currency) for fee in term.fees]
    return found


def in_advance(
    inputs: InvoiceInputs, owed: Sequence[Term], period: BillingPeriod, account: BillingAccount
) -> list[Line]:
    """Of this period what is not billed yet, or was billed too much; and of the next one."""
    found = []
    following = period_around(period.ends_at, account.anchor_day, account.timezone)[1]
    for term in owed:
        if term.plan.interval != MONTH or not term.plan.in_advance:
            continue
        part = term.part(period.starts_at, period.ends_at)
        ahead = term.part(period.ends_at, following)
        for fee in term.fees:
            before = [
                each
                for each in term.billed(inputs, fee, period.starts_at)
                if period.starts_at <= each.line.starts_at < period.ends_at
            ]
            billed = sum(each.line.exact for each in before)
            units = part.share(fee.units) if part else 0
            if part is not None and not billed:
                found.append(_fee_line(fee, part, term, account.currency))
            elif units != billed:
                since = term.ends_at or period.starts_at
                bounds = (min(since, period.ends_at), period.ends_at)
                note = fee._replace(text=f"{fee.text}, change of what was billed in advance")
                change = _line(note, units - billed, bounds, account.currency, term.details)
                found.append(_taxed_as(change, before))
            if ahead is not None:
                found.append(_fee_line(fee, ahead, term, account.currency))
    return found


def yearly(
    inputs: InvoiceInputs, owed: Sequence[Term], period: BillingPeriod, account: BillingAccount
) -> list[Line]:
    """In advance where a year begins, in arrears where it ends; less where the fee ends."""
    found = []
    for term in owed:
        if term.plan.interval != YEAR:
            continue
        for number, start, end in years(term.subscription, account, period.ends_at):
            first, last = max(start, term.starts_at), min(end, term.ends_at or end)
            late = not term.plan.in_advance and last > period.ends_at
            if last <= first or first > period.ends_at or late:
                continue
            for fee in term.fees:
                before = [
                    each
                    for each in term.billed(inputs, fee, period.starts_at)
                    if each.line.details.get("year") == number
                ]
                change = _share(fee.units, start, last, end) - _share(fee.units, start, first, end)
                change -= sum(each.line.exact for each in before)
                bounds = (last, end) if before else (first, last)
                note = fee._replace(
                    text=f"{fee.text}, {bounds[0]:%Y-%m-%d} to {bounds[1]:%Y-%m-%d}"
                )
                if change:
                    details = term.details | {"year": number}
                    line = _line(note, change, bounds, account.currency, details)
                    found.append(_taxed_as(line, before))
    return found


def years(
    subscription: Subscription, account: BillingAccount, until: datetime
) -> list[tuple[int, datetime, datetime]]:
    """Number, start and end of the contract years that begin up to `until`."""
    found: list[tuple[int, datetime, datetime]] = []
    start = subscription.fees_from
    while start <= until and (subscription.ends_at is None or start < subscription.ends_at):
        end = anniversary(subscription.fees_from, len(found) + 1, account.timezone)
        found.append((len(found), start, end))
        start = end
    return found


def _share(units: int, start: datetime, at: datetime, end: datetime) -> int:
    return units * ((at - start) // _MICRO) // ((end - start) // _MICRO)


def _taxed_as(line: Line, before: Sequence[BilledFee]) -> Line:
    """A fee that returns takes its tax back at the rate at which it was billed."""
    if not before or line.exact >= 0:
        return line
    last = before[-1]
    at = min(last.billed_at, last.line.ends_at - _MICRO)
    return replace(line, details=line.details | {"taxed_at": at.isoformat()})


def _fees(plan: Plan, seats: int) -> tuple[_Fee, ...]:
    extra = max(0, seats - plan.included_seats)
    fees = (
        _Fee("base_fee", plan.base_fee, 1, "plan", f"Plan {plan.name}"),
        _Fee("seats", plan.seat_fee * extra, extra, "seats", f"Plan {plan.name}, {extra} seats"),
    )
    return tuple(fee for fee in fees if fee.units)


def _fee_line(fee: _Fee, part: Segment, term: Term, currency: str) -> Line:
    partial = part.end - part.begin < part.whole
    share = f", {part.starts_at:%Y-%m-%d} to {part.ends_at:%Y-%m-%d}" if partial else ""
    exact = part.share(fee.units)
    bounds = part.starts_at, part.ends_at
    return _line(fee._replace(text=fee.text + share), exact, bounds, currency, term.details)


def _line(
    fee: _Fee,
    exact: int,
    bounds: tuple[datetime, datetime],
    currency: str,
    details: dict[str, Any],
) -> Line:
    return Line(
        fee.kind,
        fee.text,
        exact,
        round_to_minor(exact, currency)[0],
        *bounds,
        quantity=fee.quantity,
        unit=fee.unit,
        details=dict(details),
    )
