"""The inputs of invoices, read for many periods at once with a fixed number of queries."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.invoicing import promoted_fees
from billing.invoicing.promoted_fees import PromotedInvoices
from billing.invoicing.tables import UNCOLLECTIBLE, VOID, CreditNote, Invoice, InvoiceLine
from billing.ledger import credits
from billing.ledger.tables import CreditGrant, CreditUse
from billing.periods import Span
from billing.pricing.prices import version_of
from billing.pricing.pricing import Component, Rate, tier_of
from billing.pricing.tables import PriceVersionRow
from billing.subscriptions.subscriptions import (
    YEAR,
    AddOns,
    Subscriptions,
    read_add_ons,
    read_subscriptions,
)
from billing.usage.daily_sums import KEY, SUMS, is_divided
from billing.usage.rollups import ADJUSTMENT
from billing.usage.tables import Adjustment, DailyUsage, UsageBatch, UsageEventRow
from core.money import units_of_minor

_FEES = ("base_fee", "seats", "add_on")
_NET_USAGE = ("usage", "late_usage", "adjustment", "included")
_VERSION = [column.key for column in KEY].index("price_version")
_LAST_MOMENT = timedelta(microseconds=1)


class BilledFee(NamedTuple):
    """A fee on an invoice, by the subscription's plan."""

    line: InvoiceLine
    period_end: datetime
    billed_at: datetime
    credited: int = 0  # picounits of it that credit notes have returned


@dataclass(slots=True)
class InvoiceInputs:
    """Hold the tenants' locks from before reading until the invoices are written."""

    usage: dict[str, list[Any]] = field(
        default_factory=dict
    )  # by bill period id; columns KEY, SUMS
    adjustments: dict[str, list[Adjustment]] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)  # by period id
    following: dict[str, Span] = field(default_factory=dict)  # the next period, where it exists
    subscriptions: Subscriptions = field(default_factory=dict)
    add_ons: dict[str, AddOns] = field(default_factory=dict)  # by tenant id
    invoices: dict[str, Invoice] = field(default_factory=dict)  # by period id
    used: dict[tuple[str, str], int] = field(default_factory=dict)  # by (period id, kind of credit)
    grants: dict[str, list[CreditGrant]] = field(default_factory=dict)  # by tenant id
    unrated: set[str] = field(default_factory=set)  # ids of periods with unrated usage
    # By subscription, kind, and the add-on's row (0: none).
    fees: dict[tuple[int, str, int], list[BilledFee]] = field(default_factory=dict)
    # Of the same keys: fees that were billed ahead on invoices that are void.
    voided: dict[tuple[int, str, int], list[BilledFee]] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)  # picounits written off, by invoice id
    promoted: PromotedInvoices = field(default_factory=lambda: PromotedInvoices({}, {}))
    # Net usage on earlier invoices: (tenant, end of the period, end of the line, picounits).
    drawn: list[tuple[str, datetime, datetime, int]] = field(default_factory=list)
    tiers: dict[str, str] = field(default_factory=dict)  # of prices of a service tier, by version
    rates: dict[str, Mapping[Component, Rate]] = field(default_factory=dict)  # by price version
    # Of corrected periods, by id: (start of the period that billed it, picounits).
    billed: dict[str, list[tuple[datetime, int]]] = field(default_factory=dict)

    def fees_before(
        self, subscription_id: int, kind: str, holding: int, at: datetime
    ) -> list[BilledFee]:
        """Fees of a subscription, or of one of its add-ons, on the invoices of earlier periods."""
        found = self.fees.get((subscription_id, kind, holding), ())
        return [each for each in found if each.period_end <= at]

    def voided_before(
        self, subscription_id: int, kind: str, holding: int, at: datetime
    ) -> list[BilledFee]:
        """The latest by start of the fees that were to begin before this moment and are void."""
        found = self.voided.get((subscription_id, kind, holding), ())
        latest = {each.line.starts_at: each for each in found if each.line.starts_at < at}
        return list(latest.values())

    def drawn_between(self, tenant_id: str, after: datetime, until: datetime) -> int:
        """Net usage on invoices whose period ends after the one moment and up to the other, less
        corrections of what was used before."""
        return sum(
            units
            for who, end, line_end, units in self.drawn
            if who == tenant_id and after < end <= until and line_end > after
        )

    def settled(self, period_id: str, before: datetime) -> int:
        """Usage of a corrected period, with its corrections that were billed before this moment."""
        return sum(units for at, units in self.billed.get(period_id, ()) if at < before)


def read_inputs(session: Session, periods: Sequence[BillingPeriod], now: datetime) -> InvoiceInputs:
    ids = [period.id for period in periods]
    tenants = {period.tenant_id for period in periods}
    usage = _usage(session, ids)
    inputs = InvoiceInputs(
        usage,
        _adjustments(session, ids),
        subscriptions=read_subscriptions(session, tenants),
        add_ons=read_add_ons(session, tenants),
        invoices=_invoices(session, ids),
        used=_used_credit(session, ids),
        grants=credits.open_grants(session, tenants, now),
        unrated=_unrated(session, ids),
        tiers=_tiers(session),
        rates=_rates(session, usage),
    )
    _read_earlier_plan_lines(session, inputs, periods)
    behind = {str(row[len(KEY) - 1]) for rows in inputs.usage.values() for row in rows}
    corrected = {each.usage_period_id for some in inputs.adjustments.values() for each in some}
    inputs.billed = _billed(session, corrected)
    behind |= corrected
    inputs.spans = {period.id: period.span for period in periods}
    inputs.spans |= _spans(session, behind - inputs.spans.keys())
    return inputs


def _read_earlier_plan_lines(
    session: Session, inputs: InvoiceInputs, periods: Sequence[BillingPeriod]
) -> None:
    """For tenants whose plan is billed by the year or in advance; others need no earlier invoice."""
    tenants = [
        tenant_id
        for tenant_id, held in inputs.subscriptions.items()
        if any(plan.in_advance or YEAR in (plan.interval, plan.committed_by) for _, plan in held)
    ]
    if not tenants:
        return
    inputs.following = _following(session, [each for each in periods if each.tenant_id in tenants])
    rows = session.execute(
        select(InvoiceLine, Invoice)
        .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
        .where(
            Invoice.tenant_id.in_(tenants),
            Invoice.period_id.not_in([period.id for period in periods]),
            InvoiceLine.kind.in_((*_FEES, *_NET_USAGE)),
        )
        .order_by(Invoice.period_end, InvoiceLine.id)
    ).all()
    invoices = {invoice.id: invoice for _, invoice in rows}
    noted = _noted(session, [each for each in invoices.values() if each.final_at is not None])
    inputs.lost = {
        each.id: _lost(each) for each in invoices.values() if each.status == UNCOLLECTIBLE
    }
    fee_rows = [(line, invoice) for line, invoice in rows if line.kind in _FEES]
    inputs.promoted = promoted_fees.read(session, fee_rows)
    fees: dict[tuple[int, str, int], list[BilledFee]] = defaultdict(list)
    voided: dict[tuple[int, str, int], list[BilledFee]] = defaultdict(list)
    for line, invoice in rows:
        void = invoice.status == VOID
        if line.kind in _NET_USAGE:
            late = line.kind == "late_usage"  # counts where it is billed
            line_end = invoice.period_end if late else line.ends_at
            if not void:
                inputs.drawn.append((invoice.tenant_id, invoice.period_end, line_end, line.exact))
        elif "subscription" in line.details:
            holding = int(line.details.get("holding", 0))
            key = (int(line.details["subscription"]), line.kind, holding)
            billed_at = invoice.final_at or invoice.drafted_at
            net = invoice.subtotal_minor - invoice.promo_minor
            credited = 0
            if net > 0 and line.exact > 0:
                credited = line.exact * noted.get(invoice.id, 0) // net
            ahead = line.ends_at > invoice.period_end  # what is not ahead stays cancelled
            chosen = voided if void and ahead else fees
            chosen[key].append(BilledFee(line, invoice.period_end, billed_at, credited))
    inputs.fees, inputs.voided = fees, voided


def _noted(session: Session, invoices: Sequence[Invoice]) -> dict[str, int]:
    """Net minor units of the credit notes on each invoice."""
    rows = session.execute(
        select(CreditNote.invoice_id, func.sum(CreditNote.net_minor))
        .where(CreditNote.invoice_id.in_([each.id for each in invoices]))
        .group_by(CreditNote.invoice_id)
    )
    return {row[0]: int(row[1]) for row in rows}


def _lost(invoice: Invoice) -> int:
    """What is written off, without its share of the tax."""
    left = invoice.due_minor - invoice.paid_minor - invoice.credited_minor
    net = invoice.total_minor - invoice.tax_minor
    units = units_of_minor(left, invoice.currency)
    return units * net // invoice.total_minor if invoice.total_minor else units


def _following(session: Session, periods: Sequence[BillingPeriod]) -> dict[str, Span]:
    rows = session.scalars(
        select(BillingPeriod).where(
            BillingPeriod.tenant_id.in_({each.tenant_id for each in periods}),
            BillingPeriod.starts_at.in_({each.ends_at for each in periods}),
        )
    )
    known = {(row.tenant_id, row.starts_at): row.span for row in rows}
    pairs = ((each.id, known.get((each.tenant_id, each.ends_at))) for each in periods)
    return {period_id: span for period_id, span in pairs if span is not None}


def last_moment(period: BillingPeriod) -> datetime:
    return period.ends_at - _LAST_MOMENT


def _usage(session: Session, ids: Sequence[str]) -> dict[str, list[Any]]:
    columns = [func.sum(column) for _, count, amount in SUMS for column in (count, amount)]
    rows = session.execute(
        select(*KEY, *columns, DailyUsage.bill_period_id)
        .where(
            DailyUsage.bill_period_id.in_(ids), DailyUsage.kind != ADJUSTMENT
        )  # adjustments have their own lines
        .group_by(DailyUsage.bill_period_id, *KEY)
        .order_by(DailyUsage.bill_period_id, *KEY)
    )
    found: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        found[row[-1]].append(row)
    return found


def _adjustments(session: Session, ids: Sequence[str]) -> dict[str, list[Adjustment]]:
    rows = session.scalars(
        select(Adjustment).where(Adjustment.bill_period_id.in_(ids)).order_by(Adjustment.id)
    )
    found: dict[str, list[Adjustment]] = defaultdict(list)
    for row in rows:
        found[row.bill_period_id].append(row)
    return found


def _billed(session: Session, ids: set[str]) -> dict[str, list[tuple[datetime, int]]]:
    """What each period was billed for usage, and every correction of it since."""
    if not ids:
        return {}
    start, period = BillingPeriod.starts_at, BillingPeriod.id
    usage = (
        select(period, start, func.sum(DailyUsage.amount))
        .join(DailyUsage, DailyUsage.bill_period_id == period)
        .where(period.in_(ids), DailyUsage.kind != ADJUSTMENT)
        .group_by(period, start)
    )
    since = (
        select(Adjustment.usage_period_id, start, Adjustment.amount)
        .join(BillingPeriod, period == Adjustment.bill_period_id)
        .where(Adjustment.usage_period_id.in_(ids))
    )
    found: dict[str, list[tuple[datetime, int]]] = defaultdict(list)
    for query in (usage, since):
        for period_id, at, units in session.execute(query):
            found[period_id].append((at, int(units)))
    return found


def _invoices(session: Session, ids: Sequence[str]) -> dict[str, Invoice]:
    rows = session.scalars(
        select(Invoice).where(Invoice.period_id.in_(ids)).execution_options(populate_existing=True)
    )
    return {row.period_id: row for row in rows}


def _used_credit(session: Session, ids: Sequence[str]) -> dict[tuple[str, str], int]:
    """Picounits of credit that usage of each period has drawn, by kind."""
    rows = session.execute(
        select(CreditUse.bill_period_id, CreditUse.kind, func.sum(CreditUse.units))
        .where(CreditUse.bill_period_id.in_(ids), CreditUse.purpose == "usage")
        .group_by(CreditUse.bill_period_id, CreditUse.kind)
    )
    return {(str(row[0]), row[1]): int(row[2]) for row in rows}


def _unrated(session: Session, ids: Sequence[str]) -> set[str]:
    """Starts from the few unrated batches: starting from the periods would scan a month of events
    whenever any batch is unrated.
    """
    waiting = session.scalars(select(UsageBatch.id).where(UsageBatch.rated_at.is_(None))).all()
    if not waiting:
        return set()
    event, period = UsageEventRow, BillingPeriod
    inside = and_(
        period.tenant_id == event.tenant_id,
        period.starts_at <= event.occurred_at,
        period.ends_at > event.occurred_at,
    )
    rows = session.scalars(
        select(period.id)
        .join(event, inside)
        .where(event.batch_id.in_(waiting), period.id.in_(ids))
        .distinct()
    )
    return set(rows)


def _spans(session: Session, ids: Iterable[str]) -> dict[str, Span]:
    wanted = set(ids)
    if not wanted:
        return {}
    rows = session.scalars(select(BillingPeriod).where(BillingPeriod.id.in_(wanted)))
    return {row.id: row.span for row in rows}


def _rates(session: Session, usage: dict[str, list[Any]]) -> dict[str, Mapping[Component, Rate]]:
    """Of the versions of divided usage, which say what prices its parts."""
    ids = {
        str(row[_VERSION])
        for rows in usage.values()
        for row in rows
        if is_divided(row[len(KEY) : len(KEY) + 2 * len(SUMS)])
    }
    if not ids:
        return {}
    rows = session.scalars(select(PriceVersionRow).where(PriceVersionRow.id.in_(ids)))
    return {row.id: version_of(row).rates for row in rows}


def _tiers(session: Session) -> dict[str, str]:
    row = PriceVersionRow
    found = session.execute(select(row.id, row.model).where(row.model.contains("@")))
    return {
        version: tier for version, model in found if (tier := tier_of(model)) and tier != "cache"
    }
