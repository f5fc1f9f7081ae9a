"""Audit checks of ledger, wallets, invoices, receivables and invoice numbers."""

from collections import defaultdict
from collections.abc import Iterator

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.archive import frozen_sums
from billing.archive.tables import ClosedCharges
from billing.closing import closing, row_sums
from billing.closing.row_sums import RowSums
from billing.differences import EVERYTHING, Difference, Since, amount
from billing.invoicing.invoices import DRAFT, UNCOLLECTIBLE, VOID
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import (
    CreditGrant,
    CreditUse,
    LedgerAccount,
    LedgerEntry,
    LedgerTransaction,
)
from billing.usage.border import Border, archive_of, border_of, not_moved, readable
from billing.usage.tables import Adjustment, Charge, ClosedDay, DailyUsage, UsageEventRow
from core.errors import DependencyDown
from core.money import units_of_minor

_L, _T, _A = LedgerEntry, LedgerTransaction, LedgerAccount


def transactions_sum_to_zero(session: Session, since: Since = EVERYTHING) -> list[Difference]:
    total = func.sum(_L.units)
    query = (
        select(_L.transaction_id, _L.currency, total)
        .group_by(_L.transaction_id, _L.currency)
        .having(total != 0)
    )
    if since != EVERYTHING:
        query = query.where(_L.transaction_id.in_(_open_transactions(since)))
    rows = session.execute(query)
    return [
        amount("ledger", f"transaction {row[0]} does not sum to zero in {row[1]}", int(row[2]))
        for row in rows
    ]


def balances_are_sums(session: Session, since: Since = EVERYTHING) -> list[Difference]:
    """The balance of an account equals its entries; of open days: where they have entries."""
    total = func.coalesce(func.sum(_L.units), 0)
    query = select(_A.id, _A.tenant_id, _A.kind, _A.balance, total)
    query = query.outerjoin(_L, _L.account_id == _A.id)
    if since != EVERYTHING:
        query = query.where(_L.id > since.entry)
    rows = session.execute(query.group_by(_A.id, _A.tenant_id, _A.kind, _A.balance)).all()
    frozen: dict[str, int] = {}
    if since != EVERYTHING:
        frozen = frozen_sums.closed_units(
            session, frozen_sums.ACCOUNT, (str(row[0]) for row in rows)
        )
    found = []
    for account, who, kind, kept, units in rows:
        there = int(units) + frozen.get(str(account), 0)
        if kept != there:
            message = f"account {kind} has balance {kept}, its entries sum to {there}"
            found.append(amount("ledger", message, kept - there, (), who))
    return found


def _open_transactions(since: Since) -> Select[str]:
    return select(_L.transaction_id).where(_L.id > since.entry).distinct()


def charges_and_ledger(session: Session, since: Since = EVERYTHING) -> list[Difference]:
    """The revenue of a transaction equals its charges and adjustments."""
    border = border_of(session)
    if since == EVERYTHING and border is not None:
        since = closing.usage_after(session.get_one(ClosedDay, border.last_day))
    whole = since == EVERYTHING
    expected: dict[str, int] = defaultdict(int)
    for table in (Charge, Adjustment):
        query = select(table.transaction_id, func.sum(table.amount)).group_by(table.transaction_id)
        if not whole:
            posted_or_open = _open_transactions(since).union(_charged_transactions(table, since))
            query = query.where(table.transaction_id.in_(posted_or_open))
        for transaction_id, units in session.execute(query):
            expected[transaction_id] += int(units)
    posted = (
        select(_T.id, -func.sum(_L.units))
        .join(_L, _L.transaction_id == _T.id)
        .join(_A, _A.id == _L.account_id)
        .where(_T.kind.in_(("usage", "adjustment")), _A.kind == AccountKind.REVENUE.value)
        .group_by(_T.id)
    )
    if not whole:
        posted = posted.where(_T.id.in_(_open_transactions(since)))
    there = {row[0]: int(row[1]) for row in session.execute(posted)}
    if border is not None:
        _add_moved(session, border, expected, there)
    found = []
    for transaction_id in expected.keys() | there.keys():
        want, have = expected.get(transaction_id, 0), there.get(transaction_id, 0)
        if want == have:
            continue
        ids = session.scalars(
            select(Charge.request_id).where(Charge.transaction_id == transaction_id).limit(20)
        )
        message = f"transaction {transaction_id} has revenue {have}, its charges sum to {want}"
        found.append(amount("charges/ledger", message, have - want, ids))
    return found


def _add_moved(
    session: Session, border: Border, expected: dict[str, int], there: dict[str, int]
) -> None:
    """Add the charges of moved days to transactions that have some. A transaction of rating may have
    charges of two days, of which the first is moved; those that are still here are not its whole."""
    ids = expected.keys() | there.keys()
    off = [each for each in ids if expected.get(each, 0) != there.get(each, 0)]
    archive = archive_of(session)
    if not off or archive is None:
        return  # the check of closed days says so
    for some in frozen_sums.chunks(off):
        here = session.execute(
            select(Charge.transaction_id, func.sum(Charge.amount))
            .join(UsageEventRow, UsageEventRow.request_id == Charge.request_id)
            .where(Charge.transaction_id.in_(some), *not_moved(border))
            .group_by(Charge.transaction_id)
        )
        kept = {row[0]: int(row[1]) for row in here}
        adjusted = {
            row[0]: int(row[1])
            for row in session.execute(
                select(Adjustment.transaction_id, func.sum(Adjustment.amount))
                .where(Adjustment.transaction_id.in_(some))
                .group_by(Adjustment.transaction_id)
            )
        }
        try:
            moved = readable(archive, border).posted(some, border.last_day)
        except DependencyDown:
            continue  # as above
        for each in some:
            expected[each] = kept.get(each, 0) + adjusted.get(each, 0) + moved.get(each, 0)


def _charged_transactions(table: type[Charge | Adjustment], since: Since) -> Select[str]:
    """Transactions that charges or adjustments of open days name."""
    query = select(table.transaction_id)
    if table is Adjustment:
        return query.where(Adjustment.created_at >= since.day).distinct()
    return (
        query.join(UsageEventRow, UsageEventRow.request_id == Charge.request_id)
        .where(UsageEventRow.batch_id > since.batch)
        .distinct()
    )


def wallets_and_grants(session: Session, since: Since = EVERYTHING) -> list[Difference]:
    """The remaining credit of the grants equals the ledger's wallet balances."""
    left: dict[tuple[str, str, str], int] = defaultdict(int)
    rows = session.execute(
        select(
            CreditGrant.tenant_id,
            CreditGrant.kind,
            CreditGrant.currency,
            func.sum(CreditGrant.remaining),
        ).group_by(CreditGrant.tenant_id, CreditGrant.kind, CreditGrant.currency)
    )
    for tenant_id, kind, currency, units in rows:
        left[(tenant_id, kind, currency)] += int(units)
    accounts = session.execute(
        select(_A.tenant_id, _A.kind, _A.currency, _A.balance).where(
            _A.kind.in_((AccountKind.PREPAID.value, AccountKind.PROMO.value))
        )
    )
    owed = {(row[0], row[1], row[2]): -row[3] for row in accounts}
    found = [
        amount(
            "grants/ledger",
            f"{key[1]} grants have {left.get(key, 0)} left, the ledger has {owed.get(key, 0)}",
            left.get(key, 0) - owed.get(key, 0),
            (),
            key[0],
        )
        for key in left.keys() | owed.keys()
        if left.get(key, 0) != owed.get(key, 0)
    ]
    used = func.coalesce(func.sum(CreditUse.units), 0)
    query = select(
        CreditGrant.id, CreditGrant.tenant_id, CreditGrant.granted - CreditGrant.remaining, used
    ).outerjoin(CreditUse, CreditUse.grant_id == CreditGrant.id)
    if since != EVERYTHING:
        query = query.where(CreditUse.id > since.use)
    drawn = session.execute(
        query.group_by(
            CreditGrant.id, CreditGrant.tenant_id, CreditGrant.granted, CreditGrant.remaining
        )
    ).all()
    frozen: dict[str, int] = {}
    if since != EVERYTHING:
        frozen = frozen_sums.closed_units(session, frozen_sums.GRANT, (row[0] for row in drawn))
    for grant_id, tenant_id, gone, open_uses in drawn:
        uses = int(open_uses) + frozen.get(grant_id, 0)
        if int(gone) != uses:
            message = f"grant {grant_id} is {int(gone)} lower, its uses sum to {uses}"
            found.append(amount("grants/uses", message, int(gone) - uses, (), tenant_id))
    return found


def charges_and_invoices(
    session: Session, since: Since = EVERYTHING, rows: RowSums | None = None
) -> list[Difference]:
    """A final invoice bills exactly the charges and adjustments of its period. Of open days: the
    periods that were closed since.
    """
    usage = ("usage", "late_usage", "adjustment")
    closed = select(BillingPeriod.id).where(BillingPeriod.closed_at.is_not(None))
    billed_lines = (
        select(Invoice.period_id, func.sum(InvoiceLine.exact))
        .join(InvoiceLine, InvoiceLine.invoice_id == Invoice.id)
        .where(Invoice.status != DRAFT, InvoiceLine.kind.in_(usage))
        .group_by(Invoice.period_id)
    )
    if since.day is not None:
        closed = closed.where(BillingPeriod.closed_at >= since.day)
        billed_lines = billed_lines.where(Invoice.period_id.in_(closed))
    billed = {row[0]: int(row[1]) for row in session.execute(billed_lines)}
    expected: dict[str, int] = defaultdict(int)
    periods = set(session.scalars(closed))
    for group in (rows or row_sums.read(session, since)).every_group():
        if group.bill_period_id in periods:
            expected[group.bill_period_id] += group.amount
    for period_id, units in _charged_in(session, closed, since):
        expected[period_id] += int(units)
    found = []
    for period_id in expected.keys() | billed.keys():
        want, have = expected.get(period_id, 0), billed.get(period_id, 0)
        if want != have:
            ids = session.scalars(
                select(Charge.request_id).where(Charge.bill_period_id == period_id).limit(20)
            )
            message = f"the invoice of period {period_id} bills {have}, its charges sum to {want}"
            found.append(amount("charges/invoices", message, have - want, ids))
    return found


def _charged_in(session: Session, periods: Select[str], since: Since) -> Iterator[tuple[str, int]]:
    """Units by bill period: adjusted and, where the rows are of open days, charged on closed ones."""
    for table in (Adjustment,) if since == EVERYTHING else (Adjustment, ClosedCharges):
        query = (
            select(table.bill_period_id, func.sum(table.amount))
            .where(table.bill_period_id.in_(periods))
            .group_by(table.bill_period_id)
        )
        for row in session.execute(query):
            yield row[0], row[1]


def invoices_add_up(session: Session) -> list[Difference]:
    """The totals of an invoice equal the sums of its lines."""
    found = []
    rows = session.execute(
        select(
            Invoice,
            func.coalesce(func.sum(InvoiceLine.amount_minor), 0),
            func.coalesce(func.sum(InvoiceLine.exact).filter(InvoiceLine.kind != "tax"), 0),
        )
        .outerjoin(InvoiceLine, InvoiceLine.invoice_id == Invoice.id)
        .where(Invoice.status != DRAFT)
        .group_by(Invoice.id)
    )
    for invoice, minor, exact in rows:
        gross = invoice.subtotal_minor + invoice.tax_minor
        total = gross - invoice.promo_minor
        due = total - invoice.prepaid_minor
        off = (
            abs(int(minor) - gross)
            + abs(total - invoice.total_minor)
            + abs(due - invoice.due_minor)
        )
        units = units_of_minor(off, invoice.currency) + abs(int(exact) - invoice.exact)
        if units:
            message = f"the totals of invoice {invoice.label} do not equal the sums of its lines"
            found.append(amount("invoices", message, units, (), invoice.tenant_id))
    return found


def receivables_are_open_amounts(session: Session) -> list[Difference]:
    """A tenant's receivable equals its open invoices plus usage that is not yet invoiced."""
    owed: dict[str, int] = defaultdict(int)
    left = func.sum(Invoice.due_minor - Invoice.paid_minor - Invoice.credited_minor)
    by_tenant = (Invoice.tenant_id, Invoice.currency)
    standing = Invoice.status.not_in((DRAFT, VOID, UNCOLLECTIBLE))
    for tenant_id, currency, minor in session.execute(
        select(*by_tenant, left).where(standing).group_by(*by_tenant)
    ):
        owed[tenant_id] += units_of_minor(int(minor), currency)
    open_periods = select(BillingPeriod.id).where(BillingPeriod.closed_at.is_(None))
    for table, column, sign in (
        (DailyUsage, DailyUsage.amount, 1),  # with adjustments
        (CreditUse, CreditUse.units, -1),
    ):
        rows = session.execute(
            select(table.tenant_id, func.sum(column))
            .where(table.bill_period_id.in_(open_periods))
            .group_by(table.tenant_id)
        )
        for tenant_id, units in rows:
            owed[tenant_id] += sign * int(units)
    accounts = session.execute(
        select(_A.tenant_id, func.sum(_A.balance))
        .where(_A.kind == AccountKind.RECEIVABLE.value)
        .group_by(_A.tenant_id)
    )
    there = {row[0]: int(row[1]) for row in accounts}
    return [
        amount(
            "invoices/ledger",
            f"receivable is {there.get(who, 0)}, open and uninvoiced amounts sum to {owed.get(who, 0)}",
            there.get(who, 0) - owed.get(who, 0),
            (),
            who,
        )
        for who in owed.keys() | there.keys()
        if there.get(who, 0) != owed.get(who, 0)
    ]
