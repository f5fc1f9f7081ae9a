"""Exact lines of a period's invoice for plans: fees, included usage and commitments.

Fees by the month in arrears are those of the period. Fees in advance are those of the next period, with
what has changed since they were billed; fees by the year are due where a year begins or ends. What an
earlier invoice billed for the same time is subtracted, so that a cancellation returns the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

from billing.earlier_periods import correction_lines, is_earlier
from billing.invoice_inputs import BilledFee, InvoiceInputs
from billing.invoice_lines import Line, adjustment_lines, usage_lines
from billing.models import BillingAccount, BillingPeriod, Plan, Subscription
from billing.periods import period_around
from billing.subscriptions import MONTH, YEAR, Segment, anniversary, segments
from core.money import round_to_minor

_Held = Sequence[tuple[Subscription, Plan]]
_MICRO = timedelta(microseconds=1)


class _Fee(NamedTuple):
    kind: str
    units: int  # per interval
    quantity: int
    text: str


def build(inputs: InvoiceInputs, period: BillingPeriod, account: BillingAccount) -> list[Line]:
    """All lines of the period's invoice before credit and tax."""
    currency = account.currency
    used = usage_lines(inputs, period, currency)
    adjusted = adjustment_lines(inputs, period, currency)
    held = inputs.subscriptions.get(period.tenant_id, ())
    corrected = correction_lines(inputs, held, period, adjusted, currency)
    spent = sum(line.exact for line in [*used, *adjusted] if not is_earlier(line, period))
    charged = _included(held, period, spent, currency)
    spent += sum(line.exact for line in charged)
    earlier = [line for line in adjusted if is_earlier(line, period)]
    earlier += [line for line in corrected if line.kind == "included"]
    return [
        *used,
        *adjusted,
        *_monthly(held, period, currency),
        *_in_advance(inputs, held, period, account),
        *_yearly(inputs, held, period, account),
        *charged,
        *corrected,
        *_commitment(held, period, spent, currency),
        *_yearly_commitment(inputs, held, period, account, (spent, earlier)),
    ]


def _monthly(held: _Held, period: BillingPeriod, currency: str) -> list[Line]:
    """Fees and seats by the month in arrears, of each part of the period."""
    return [
        _fee_line(fee, part, currency)
        for part in segments(held, period.starts_at, period.ends_at, with_trial=False)
        if part.plan.interval == MONTH and not part.plan.in_advance
        for fee in _fees(part.plan, part.seats)
    ]


def _in_advance(
    inputs: InvoiceInputs, held: _Held, period: BillingPeriod, account: BillingAccount
) -> list[Line]:
    """Of this period what is not billed yet, or was billed too much; and of the next one."""
    found = []
    parts = {
        part.subscription_id: part
        for part in segments(held, period.starts_at, period.ends_at, with_trial=False)
    }
    following = period_around(period.ends_at, account.anchor_day, account.timezone)[1]
    ahead = {
        part.subscription_id: part
        for part in segments(held, period.ends_at, following, with_trial=False)
    }
    for subscription, plan in held:
        if plan.interval != MONTH or not plan.in_advance:
            continue
        for fee in _fees(plan, subscription.seats):
            before = [
                each
                for each in inputs.fees_before(subscription.id, fee.kind, period.starts_at)
                if period.starts_at <= each.line.starts_at < period.ends_at
            ]
            billed = sum(each.line.exact for each in before)
            part = parts.get(subscription.id)
            owed = part.share(fee.units) if part else 0
            if part is not None and not billed:
                found.append(_fee_line(fee, part, account.currency))
            elif owed != billed:
                since = subscription.ends_at or period.starts_at
                bounds = (min(since, period.ends_at), period.ends_at)
                note = fee._replace(text=f"{fee.text}, change of what was billed in advance")
                change = _line(note, owed - billed, bounds, account.currency, subscription)
                found.append(_taxed_as(change, before))
            if subscription.id in ahead:
                found.append(_fee_line(fee, ahead[subscription.id], account.currency))
    return found


def _yearly(
    inputs: InvoiceInputs, held: _Held, period: BillingPeriod, account: BillingAccount
) -> list[Line]:
    """In advance where a year begins, in arrears where it ends; less where the subscription ends."""
    found = []
    for subscription, plan in held:
        if plan.interval != YEAR:
            continue
        for number, start, end in _years(subscription, account, period.ends_at):
            last = min(end, subscription.ends_at or end)
            if last <= start or (not plan.in_advance and last > period.ends_at):
                continue
            for fee in _fees(plan, subscription.seats):
                before = [
                    each
                    for each in inputs.fees_before(subscription.id, fee.kind, period.starts_at)
                    if each.line.details.get("year") == number
                ]
                change = fee.units * ((last - start) // _MICRO) // ((end - start) // _MICRO)
                change -= sum(each.line.exact for each in before)
                bounds = (last, end) if before else (start, last)
                note = fee._replace(
                    text=f"{fee.text}, {bounds[0]:%Y-%m-%d} to {bounds[1]:%Y-%m-%d}"
                )
                if change:
                    line = _line(note, change, bounds, account.currency, subscription, number)
                    found.append(_taxed_as(line, before))
    return found


def _included(held: _Held, period: BillingPeriod, spent: int, currency: str) -> list[Line]:
    parts = segments(held, period.starts_at, period.ends_at)
    included = sum(part.share(part.plan.included_usage) for part in parts)
    covered = max(0, min(included, spent))
    if not covered:
        return []
    return [_whole_line("included", "Usage included in the plan", -covered, currency, period)]


def _commitment(held: _Held, period: BillingPeriod, spent: int, currency: str) -> list[Line]:
    """The shortfall of the period's commitment."""
    parts = segments(held, period.starts_at, period.ends_at, with_trial=False)
    committed = sum(
        part.share(part.plan.minimum_commitment) for part in parts if part.plan.interval == MONTH
    )
    if not committed or committed <= spent:
        return []
    text = "Minimum commitment, shortfall"
    return [_whole_line("commitment", text, committed - spent, currency, period)]


def _yearly_commitment(
    inputs: InvoiceInputs,
    held: _Held,
    period: BillingPeriod,
    account: BillingAccount,
    used: tuple[int, Sequence[Line]],
) -> list[Line]:
    """The shortfall of a year that ends in this period, by the usage on the invoices of that year.
    `used` is this period's, and the corrections of earlier periods: those of the year count."""
    found = []
    spent, corrections = used
    for subscription, plan in held:
        if plan.interval != YEAR or not plan.minimum_commitment:
            continue
        for _, start, end in _years(subscription, account, period.ends_at):
            last = min(end, subscription.ends_at or end)
            if not period.starts_at < last <= period.ends_at or last <= start:
                continue
            drawn = spent + inputs.drawn_between(period.tenant_id, start, period.starts_at)
            drawn += sum(line.exact for line in corrections if line.ends_at > start)
            share = (last - start) // _MICRO, (end - start) // _MICRO
            missing = plan.minimum_commitment * share[0] // share[1] - drawn
            if missing > 0:
                text = f"Commitment of {start:%Y-%m-%d} to {last:%Y-%m-%d}, shortfall"
                found.append(_whole_line("commitment", text, missing, account.currency, period))
    return found


def _taxed_as(line: Line, before: Sequence[BilledFee]) -> Line:
    """A fee that returns takes its tax back at the rate at which it was billed."""
    if not before or line.exact >= 0:
        return line
    last = before[-1]
    at = min(last.billed_at, last.line.ends_at - _MICRO)
    return replace(line, details=line.details | {"taxed_at": at.isoformat()})


def _years(
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


def _fees(plan: Plan, seats: int) -> list[_Fee]:
    extra = max(0, seats - plan.included_seats)
    fees = (
        _Fee("base_fee", plan.base_fee, 1, f"Plan {plan.name}"),
        _Fee("seats", plan.seat_fee * extra, extra, f"Plan {plan.name}, {extra} seats"),
    )
    return [fee for fee in fees if fee.units]


def _fee_line(fee: _Fee, part: Segment, currency: str) -> Line:
    partial = part.end - part.begin < part.whole
    share = f", {part.starts_at:%Y-%m-%d} to {part.ends_at:%Y-%m-%d}" if partial else ""
    exact = part.share(fee.units)
    return Line(
        fee.kind,
        fee.text + share,
        exact,
        round_to_minor(exact, currency)[0],
        part.starts_at,
        part.ends_at,
        quantity=fee.quantity,
        unit="seats" if fee.kind == "seats" else "plan",
        details={
            "plan": part.plan.id,
            "seats": part.seats,
            "subscription": part.subscription_id,
        },
    )


def _line(
    fee: _Fee,
    exact: int,
    bounds: tuple[datetime, datetime],
    currency: str,
    subscription: Subscription,
    year: int | None = None,
) -> Line:
    details = {
        "plan": subscription.plan_id,
        "seats": subscription.seats,
        "subscription": subscription.id,
    }
    return Line(
        fee.kind,
        fee.text,
        exact,
        round_to_minor(exact, currency)[0],
        *bounds,
        quantity=fee.quantity,
        unit="seats" if fee.kind == "seats" else "plan",
        details=details if year is None else details | {"year": year},
    )


def _whole_line(kind: str, text: str, exact: int, currency: str, period: BillingPeriod) -> Line:
    minor = round_to_minor(exact, currency)[0]
    return Line(kind, text, exact, minor, period.starts_at, period.ends_at)
