"""Exact lines for the fees of subscriptions and their add-ons.

Fees by the month in arrears are those of the period. Fees in advance are those of the next period, with
what has changed since they were billed; fees by the year are due where a year begins or ends. What an
earlier invoice billed for the same time is subtracted, so that a cancellation returns the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.invoicing.calculations import of_fee, of_time
from billing.invoicing.invoice_inputs import BilledFee, InvoiceInputs
from billing.invoicing.invoice_lines import Line
from billing.invoicing.promoted_fees import RETURNED, PromotedInvoices
from billing.invoicing.tables import InvoiceLine
from billing.periods import Span, days, period_around
from billing.subscriptions.subscriptions import MONTH, YEAR, AddOns, Segment, anniversary, segment
from billing.subscriptions.tables import Plan, Subscription
from core.money import decimal_of, round_to_minor

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

    def part(self, span: Span) -> Segment | None:
        owed = self.starts_at, self.ends_at or span.ends_at
        return segment(self.subscription, self.plan, owed, span)

    def billed(self, inputs: InvoiceInputs, fee: _Fee, before: datetime) -> list[BilledFee]:
        return inputs.fees_before(self.subscription.id, fee.kind, self.holding, before)

    def voided(self, inputs: InvoiceInputs, fee: _Fee, before: datetime) -> list[BilledFee]:
        return inputs.voided_before(self.subscription.id, fee.kind, self.holding, before)


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


def monthly(owed: Sequence[Term], period: BillingPeriod, account: BillingAccount) -> list[Line]:
    """Fees by the month in arrears, of each part of the period."""
    found = []
    for term in owed:
        part = term.part(period.span)
        if part is not None and term.plan.interval == MONTH and not term.plan.in_advance:
            found += [_fee_line(fee, part, term, account) for fee in term.fees if fee.units]
    return found


def in_advance(
    inputs: InvoiceInputs, owed: Sequence[Term], period: BillingPeriod, account: BillingAccount
) -> list[Line]:
    """Of this period what is not billed yet, or was billed too much; and of the next one. What was
    billed ahead on an invoice that is void is billed again."""
    found = []
    following = inputs.following.get(period.id) or _next_span(period, account)
    for term in owed:
        if term.plan.interval != MONTH or not term.plan.in_advance:
            continue
        part, ahead = term.part(period.span), term.part(following)
        for fee in term.fees:
            known = term.billed(inputs, fee, period.starts_at)
            for void in term.voided(inputs, fee, period.starts_at):
                found += _again(term, fee, void.line, known, account)
            before = [e for e in known if period.starts_at <= e.line.starts_at < period.ends_at]
            billed = sum(each.line.exact for each in before)
            units = part.share(fee.units) if part else 0
            if part is not None and units and not billed:
                found.append(_fee_line(fee, part, term, account))
            elif units != billed:
                since = term.ends_at or period.starts_at
                bounds = (min(since, period.ends_at), period.ends_at)
                note = fee._replace(text=f"{fee.text}, change of what was billed in advance")
                how = (
                    of_fee(fee.units, fee.quantity, MONTH, part.end - part.begin, part.whole)
                    if part
                    else "0"
                )
                change = _Change(
                    units - billed, bounds, term.details, f"{how} = {decimal_of(units)}"
                )
                found += _changed(note, change, before, account.currency)
            if ahead is not None and fee.units:
                found.append(_fee_line(fee, ahead, term, account))
    return found


def _next_span(period: BillingPeriod, account: BillingAccount) -> Span:
    whole = period_around(period.ends_at, account.anchor_day, account.timezone)
    return Span(period.ends_at, whole[1], *whole)


def _again(
    term: Term, fee: _Fee, void: InvoiceLine, known: Sequence[BilledFee], account: BillingAccount
) -> list[Line]:
    """What is owed of the time of a void line, less what other invoices have billed of it."""
    start, end = void.starts_at, void.ends_at
    if void.exact <= 0:
        return []
    until = max(start, min(end, term.ends_at or end))
    before = [each for each in known if start <= each.line.starts_at < end]
    text = f"{fee.text}, {days(start, until, account.timezone)}, billed again"
    note = fee._replace(text=text, quantity=void.quantity)
    owed = share(void.exact, start, until, end)
    micros = (until - start) // _MICRO, (end - start) // _MICRO
    how = f"{decimal_of(void.exact)}{of_time(*micros)} = {decimal_of(owed)}"
    change = _Change(
        owed - sum(each.line.exact for each in before), (start, until), term.details, how
    )
    return _changed(note, change, before, account.currency)


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
                units = share(fee.units, start, last, end) - share(fee.units, start, first, end)
                micros = (last - first) // _MICRO, (end - start) // _MICRO
                how = of_fee(fee.units, fee.quantity, YEAR, *micros) + f" = {decimal_of(units)}"
                units -= sum(each.line.exact for each in before)
                bounds = (last, end) if before else (first, last)
                note = fee._replace(text=f"{fee.text}, {days(*bounds, account.timezone)}")
                change = _Change(units, bounds, term.details | {"year": number}, how)
                found += _changed(note, change, before, account.currency)
    return found


def years(
    subscription: Subscription, account: BillingAccount, until: datetime
) -> list[tuple[int, datetime, datetime]]:
    """Number, start and end of the contract years that begin up to `until`."""
    found: list[tuple[int, datetime, datetime]] = []
    start = subscription.years_from
    while start <= until and (subscription.ends_at is None or start < subscription.ends_at):
        end = anniversary(subscription.years_from, len(found) + 1, account.timezone)
        found.append((len(found), start, end))
        start = end
    return found


def share(units: int, start: datetime, at: datetime, end: datetime) -> int:
    """The part of an amount of the time from `start` to `end` that is over at a moment."""
    return units * ((at - start) // _MICRO) // ((end - start) // _MICRO)


class _Change(NamedTuple):
    units: int
    bounds: tuple[datetime, datetime]
    details: dict[str, Any]
    owed: str  # how what is owed comes about


def _changed(fee: _Fee, change: _Change, before: Sequence[BilledFee], currency: str) -> list[Line]:
    """A fee that returns takes its tax back at the rate at which it was billed, and returns what no
    credit note has returned; its line names the invoices that billed it."""
    units, details = change.units, change.details
    if units < 0 and before:
        units = min(0, units + sum(each.credited for each in before))
        last = before[-1]
        at = min(last.billed_at, last.line.ends_at - _MICRO)
        details = details | {"taxed_at": at.isoformat(), "returned": _sources(before, -units)}
    if not units:
        return []
    billed = sum(each.line.exact for each in before)
    credited = units - change.units  # not returned again
    how = change.owed
    if before:
        how += f"; billed before {decimal_of(billed)}"
    if credited:
        how += f", of which credit notes returned {decimal_of(credited)}"
    line = _line(fee, units, change.bounds, currency, details)
    return [replace(line, calculation=f"{how}; this line {decimal_of(units)}")]


def _sources(before: Sequence[BilledFee], units: int) -> list[list[Any]]:
    """Invoice and picounits of what returns, from the latest invoice on."""
    left: dict[str, int] = {}
    for each in before:
        left[each.line.invoice_id] = left.get(each.line.invoice_id, 0) + each.line.exact
        for invoice_id, gone in each.line.details.get("returned", ()):
            left[each.line.invoice_id] += gone
            left[invoice_id] = left.get(invoice_id, 0) - gone
    found: list[list[Any]] = []
    for invoice_id, most in reversed(left.items()):
        part = min(most, units)
        if part > 0:
            found.append([invoice_id, part])
            units -= part
    return found


def as_paid(
    lines: Sequence[Line], lost: Mapping[str, int], promoted: PromotedInvoices, currency: str
) -> list[Line]:
    """The lines without what would return of a debt that is written off, and with what returns as
    promotional credit. `lost` is what each invoice was written off, in picounits."""
    left, found = dict(lost), []
    for line in lines:
        kept, gifts = [], {}
        for invoice_id, units in line.details.get("returned", ()):
            gift = promoted.take(invoice_id, units)
            if gift:
                gifts[invoice_id] = gift
            unpaid = min(units - gift, left.get(invoice_id, 0))
            left[invoice_id] = left.get(invoice_id, 0) - unpaid
            if units > unpaid:
                kept.append([invoice_id, units - unpaid])
        held_back = sum(part[1] for part in line.details.get("returned", ()))
        held_back -= sum(part[1] for part in kept)
        if held_back:
            exact = line.exact + held_back
            minor = round_to_minor(exact, currency)[0]
            details = line.details | {"returned": kept}
            how = f"{line.calculation}, less {decimal_of(held_back)} of a debt that is written off"
            line = replace(line, exact=exact, minor=minor, details=details, calculation=how)
        if gifts:
            how = (
                f"{line.calculation}, of which promotional credit {decimal_of(sum(gifts.values()))}"
            )
            line = replace(line, details=line.details | {RETURNED: gifts}, calculation=how)
        if line.exact or not held_back:
            found.append(line)
    return found


def _fees(plan: Plan, seats: int) -> tuple[_Fee, ...]:
    extra = max(0, seats - plan.included_seats)
    fees = (
        _Fee("base_fee", plan.base_fee, 1, "plan", f"Plan {plan.name}"),
        _Fee("seats", plan.seat_fee * extra, extra, "seats", f"Plan {plan.name}, {extra} seats"),
    )
    return fees  # one of nothing too: an earlier plan of the row may have billed it


def _fee_line(fee: _Fee, part: Segment, term: Term, account: BillingAccount) -> Line:
    partial = part.end - part.begin < part.whole
    bounds = part.starts_at, part.ends_at
    dates = f", {days(*bounds, account.timezone)}" if partial else ""
    note = fee._replace(text=fee.text + dates)
    line = _line(note, part.share(fee.units), bounds, account.currency, term.details)
    how = of_fee(fee.units, fee.quantity, MONTH, part.end - part.begin, part.whole)
    return replace(line, calculation=f"{how} = {decimal_of(line.exact)}")


def _line(
    fee: _Fee,
    exact: int,
    bounds: tuple[datetime, datetime],
    currency: str,
    details: dict[str, Any],
) -> Line:
    each = fee.units // fee.quantity if fee.quantity and fee.units % fee.quantity == 0 else 0
    return Line(
        fee.kind,
        fee.text,
        exact,
        round_to_minor(exact, currency)[0],
        *bounds,
        quantity=fee.quantity,
        unit=fee.unit,
        details=dict(details),
        unit_price=decimal_of(each) if each else "",
    )
