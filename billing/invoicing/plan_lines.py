"""Exact lines of a period's invoice: usage, fees, included usage and commitments."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.invoicing import fee_lines
from billing.invoicing.calculations import of_time
from billing.invoicing.earlier_periods import correction_lines, is_earlier
from billing.invoicing.fee_lines import Held, share, years
from billing.invoicing.invoice_inputs import InvoiceInputs
from billing.invoicing.invoice_lines import Line, adjustment_lines, usage_lines
from billing.periods import days
from billing.subscriptions.subscriptions import MONTH, YEAR, Segment, segments
from billing.subscriptions.tables import Plan, Subscription
from core.money import decimal_of, round_to_minor

_MICRO = timedelta(microseconds=1)


def build(inputs: InvoiceInputs, period: BillingPeriod, account: BillingAccount) -> list[Line]:
    """All lines of the period's invoice before credit and tax."""
    currency = account.currency
    used = usage_lines(inputs, period, currency, account.timezone)
    adjusted = adjustment_lines(inputs, period, currency)
    held = inputs.subscriptions.get(period.tenant_id, ())
    corrected = correction_lines(inputs, held, period, adjusted, account)
    spent = sum(line.exact for line in [*used, *adjusted] if not is_earlier(line, period))
    charged = _included(held, period, spent, currency)
    spent += sum(line.exact for line in charged)
    earlier = [line for line in adjusted if is_earlier(line, period)]
    earlier += [line for line in corrected if line.kind == "included"]
    owed = fee_lines.terms(held, inputs.add_ons.get(period.tenant_id, ()))
    fees = [
        *fee_lines.monthly(owed, period, account),
        *fee_lines.in_advance(inputs, owed, period, account),
        *fee_lines.yearly(inputs, owed, period, account),
    ]
    return [
        *used,
        *adjusted,
        *fee_lines.as_paid(fees, inputs.lost, inputs.promoted.copy(), currency),
        *charged,
        *corrected,
        *_commitment(held, period, spent, currency),
        *_yearly_commitment(inputs, held, period, account, (spent, earlier)),
    ]


def _included(held: Held, period: BillingPeriod, spent: int, currency: str) -> list[Line]:
    parts = segments(held, period.span)
    included = sum(part.share(part.plan.included_usage) for part in parts)
    covered = max(0, min(included, spent))
    if not covered:
        return []
    line = _whole_line("included", "Usage included in the plan", -covered, currency, period)
    how = f"{_shares(parts, 'included_usage', included)}, for all usage of the period"
    how += f"; used {decimal_of(spent)}; the lesser is included"
    return [replace(line, calculation=how)]


def _shares(parts: Sequence[Segment], name: str, units: int) -> str:
    """The amounts of the plans in the period, each by its share of time, and their sum."""
    found = [
        decimal_of(getattr(part.plan, name)) + of_time(part.end - part.begin, part.whole)
        for part in parts
        if getattr(part.plan, name)
    ]
    return f"{' + '.join(found)} = {decimal_of(units)}"


def _commitment(held: Held, period: BillingPeriod, spent: int, currency: str) -> list[Line]:
    """The shortfall of the period's commitment."""
    charged = segments(held, period.span, with_trial=False)
    parts = [part for part in charged if part.plan.committed_by == MONTH]
    committed = sum(part.share(part.plan.minimum_commitment) for part in parts)
    if not committed or committed <= spent:
        return []
    missing = committed - spent
    line = _whole_line("commitment", "Minimum commitment, shortfall", missing, currency, period)
    how = _shares(parts, "minimum_commitment", committed)
    how += f"; used, less included, {decimal_of(spent)}; this line {decimal_of(missing)}"
    return [replace(line, calculation=how)]


def _yearly_commitment(
    inputs: InvoiceInputs,
    held: Held,
    period: BillingPeriod,
    account: BillingAccount,
    used: tuple[int, Sequence[Line]],
) -> list[Line]:
    """The shortfall of a year that ends in this period, by the usage on the invoices of that year.
    `used` is this period's, and the corrections of earlier periods: those of the year count."""
    found = []
    spent, corrections = used
    for contract in _contracts(held):
        latest = contract[-1][0]
        for _, start, end in years(latest, account, period.ends_at):
            last = min(end, latest.ends_at or end)
            if not period.starts_at < last <= period.ends_at or last <= start:
                continue
            drawn = spent + inputs.drawn_between(period.tenant_id, start, period.starts_at)
            drawn += sum(line.exact for line in corrections if line.ends_at > start)
            committed = sum(_committed(part, plan, start, end) for part, plan in contract)
            missing = committed - drawn
            if missing > 0:
                text = f"Commitment of {days(start, last, account.timezone)}, shortfall"
                line = _whole_line("commitment", text, missing, account.currency, period)
                agreed = decimal_of(contract[-1][1].minimum_commitment)
                time = of_time((last - start) // _MICRO, (end - start) // _MICRO)
                how = f"{agreed} a year{time} = {decimal_of(committed)}; used {decimal_of(drawn)}"
                how += f"; this line {decimal_of(missing)}"
                found.append(replace(line, calculation=how))
    return found


def _contracts(held: Held) -> list[list[tuple[Subscription, Plan]]]:
    """Subscriptions with a yearly commitment; those that continue the years of another are one."""
    found: dict[tuple[str, datetime], list[tuple[Subscription, Plan]]] = {}
    for subscription, plan in held:
        if plan.committed_by == YEAR and plan.minimum_commitment:
            key = (subscription.plan_id, subscription.years_from)
            found.setdefault(key, []).append((subscription, plan))
    return list(found.values())


def _committed(subscription: Subscription, plan: Plan, start: datetime, end: datetime) -> int:
    """The commitment of a year for the time of one subscription in it."""
    first = max(start, subscription.fees_from)
    last = max(first, min(end, subscription.ends_at or end))
    units = plan.minimum_commitment
    return share(units, start, last, end) - share(units, start, first, end)


def _whole_line(kind: str, text: str, exact: int, currency: str, period: BillingPeriod) -> Line:
    minor = round_to_minor(exact, currency)[0]
    return Line(kind, text, exact, minor, period.starts_at, period.ends_at)
