"""Corrections of earlier periods against the included usage and the commitment of those periods.

A correction is an adjustment on the current invoice. It changes what its own period would have been
billed, not what the current period uses: what it moves of that period's included usage and shortfall
is on the current invoice too, and the current period's commitment ignores it.
"""

from collections.abc import Sequence
from itertools import groupby

from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.invoicing.invoice_inputs import InvoiceInputs
from billing.invoicing.invoice_lines import Line
from billing.periods import days
from billing.subscriptions.subscriptions import MONTH, segments
from billing.subscriptions.tables import Plan, Subscription
from core.money import round_to_minor

_TEXTS = {
    "included": "Usage included in the plan",
    "commitment": "Minimum commitment, shortfall",
}


def is_earlier(line: Line, period: BillingPeriod) -> bool:
    """Whether the line corrects a period before this one."""
    return line.kind == "adjustment" and line.usage_period_id != period.id


def correction_lines(
    inputs: InvoiceInputs,
    held: Sequence[tuple[Subscription, Plan]],
    period: BillingPeriod,
    adjustments: Sequence[Line],
    account: BillingAccount,
) -> list[Line]:
    """What the adjustments of each earlier period move of its included usage and shortfall."""
    found = []
    earlier = [line for line in adjustments if is_earlier(line, period)]
    by_period = sorted(earlier, key=lambda line: (line.starts_at, line.usage_period_id))
    for usage_period, lines in groupby(by_period, key=lambda line: line.usage_period_id):
        span = inputs.spans[usage_period]
        before = inputs.settled(usage_period, period.starts_at)
        after = before + sum(line.exact for line in lines)
        parts = segments(held, span)
        included = sum(part.share(part.plan.included_usage) for part in parts)
        charged = segments(held, span, with_trial=False)
        committed = sum(
            part.share(part.plan.minimum_commitment)
            for part in charged
            if part.plan.committed_by == MONTH
        )
        then, now = _terms(before, included, committed), _terms(after, included, committed)
        for kind, was, is_now in zip(_TEXTS, then, now, strict=True):
            if is_now != was:
                bounds = span.starts_at, span.ends_at
                text = f"{_TEXTS[kind]}, {days(*bounds, account.timezone)} as corrected"
                exact = is_now - was
                minor = round_to_minor(exact, account.currency)[0]
                found.append(Line(kind, text, exact, minor, *bounds, usage_period_id=usage_period))
    return found


def _terms(spent: int, included: int, committed: int) -> tuple[int, int]:
    """Included usage, as a negative amount, and the shortfall of a period that spent this much."""
    covered = max(0, min(included, spent))
    return -covered, max(0, committed - (spent - covered)) if committed else 0
