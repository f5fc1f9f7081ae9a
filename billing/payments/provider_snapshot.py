"""Snapshots of our records at the provider: those created within a window, plus those that we expect
from that time or that are still open, fetched by id. The cost depends on recent activity rather than
on the whole history, and lost events of old invoices are still found.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from billing.invoicing.invoices import FINAL
from billing.invoicing.tables import CreditNote, Invoice
from billing.payments import settlement
from billing.payments.base import (
    DisputeState,
    Gone,
    InvoiceState,
    PaymentProvider,
    PaymentState,
    RefundState,
    Status,
    Window,
)
from billing.payments.tables import Dispute, Payment, PaymentCommand, Refund
from core.database import Database
from core.money import units_of_minor

DEFAULT_DAYS = 35  # a month plus some delay
ALL_TIME = Window(datetime(2000, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC))
_State = TypeVar("_State")


@dataclass
class ProviderSnapshot:
    """The provider's records, by its ids."""

    name: str
    at: datetime  # time of the snapshot
    invoices: dict[str, InvoiceState] = field(default_factory=dict)
    payments: dict[str, PaymentState] = field(default_factory=dict)
    refunds: dict[str, RefundState] = field(default_factory=dict)
    disputes: dict[str, DisputeState] = field(default_factory=dict)
    expected_ids: set[str] = field(default_factory=set)  # expected ids; one that is missing is lost

    def steps(self) -> dict[str, dict[str, int]]:
        """Counts for the audit report."""
        paid = [each for each in self.payments.values() if each.status is Status.SUCCEEDED]
        return {
            f"{self.name} invoices": {"count": len(self.invoices)},
            f"{self.name} payments": {
                "count": len(paid),
                "units": sum(units_of_minor(each.amount_minor, each.currency) for each in paid),
            },
            f"{self.name} refunds": {"count": len(self.refunds)},
            f"{self.name} disputes": {"count": len(self.disputes)},
        }

    def add_invoice(self, found: InvoiceState) -> None:
        if found.invoice_id:
            self.invoices[found.external_id] = found
            for each in found.payments:
                self.payments[each.external_id] = each


def default_window(now: datetime) -> Window:
    return Window(now - timedelta(days=DEFAULT_DAYS), now + timedelta(days=1))


def fetch(
    database: Database, provider: PaymentProvider, at: datetime, window: Window | None = None
) -> ProviderSnapshot:
    """Fetch a snapshot, by default of the last 35 days. Call it outside any transaction. Raises
    TryLater if the provider does not answer.
    """
    window = window or default_window(at)
    found = ProviderSnapshot(provider.name, at)
    loose: list[PaymentState] = []
    for record in provider.records(window):
        if isinstance(record, InvoiceState):
            found.add_invoice(record)
        elif isinstance(record, PaymentState):
            loose.append(record)
        elif isinstance(record, RefundState):
            found.refunds[record.external_id] = record
        else:
            found.disputes[record.external_id] = record
    for each in loose:
        if each.payment_id:
            found.payments.setdefault(each.external_id, each)
    _fetch_expected(database, provider, window, found)
    # The account may have other uses: keep only refunds and disputes of our payments.
    with database.read() as session:
        ours = found.payments.keys() | _known(session, found)
    found.refunds = {k: v for k, v in found.refunds.items() if v.payment_external_id in ours}
    found.disputes = {k: v for k, v in found.disputes.items() if v.payment_external_id in ours}
    return found


def _fetch_expected(
    database: Database, provider: PaymentProvider, window: Window, found: ProviderSnapshot
) -> None:
    """Fetch expected records that are not among the window's records."""
    with database.read() as session:
        invoices = _names(session, _expected_invoices(provider.name, window))
        payments = _names(session, _expected(Payment, provider.name, window))
        refunds = _names(session, _expected(Refund, provider.name, window))
        query = select(Dispute.external_id, Dispute.id).where(
            Dispute.provider == provider.name,
            or_(_within(Dispute.opened_at, window), Dispute.closed_at.is_(None)),
        )
        disputes = _names(session, query)
    found.expected_ids = {*invoices, *payments, *refunds, *disputes}
    for state in _fetched(provider.invoice, invoices, found.invoices):
        found.add_invoice(state)
    for paid in _fetched(provider.payment, payments, found.payments):
        found.payments[paid.external_id] = paid
    for back in _fetched(provider.refund_state, refunds, found.refunds):
        found.refunds[back.external_id] = back
    for dispute in _fetched(provider.dispute, disputes, found.disputes):
        found.disputes[dispute.external_id] = dispute


def _fetched(
    ask: Callable[[str], _State], names: dict[str, bool], there: dict[str, _State]
) -> Iterable[_State]:
    for name, has_external_id in names.items():
        if not has_external_id or name in there:
            continue
        try:
            yield ask(name)
        except Gone:
            continue


def _names(session: Session, query: Any) -> dict[str, bool]:
    """The provider's id, or ours if there is none; the value tells whether it is the provider's."""
    rows = session.execute(query)
    return {external_id or own_id: external_id is not None for external_id, own_id in rows}


def _expected_invoices(name: str, window: Window) -> Any:
    """Invoices sent to the provider: finalized or changed within the window, or still open."""
    paid = select(Payment.invoice_id).where(
        Payment.invoice_id.is_not(None),
        or_(_within(Payment.created_at, window), _within(Payment.settled_at, window)),
    )
    lowered = select(CreditNote.invoice_id).where(_within(CreditNote.issued_at, window))
    sent = select(PaymentCommand.subject_id).where(
        PaymentCommand.provider == name, PaymentCommand.kind == "invoice"
    )
    return select(Invoice.external_id, Invoice.id).where(
        Invoice.external_id.is_not(None),
        Invoice.id.in_(sent),
        or_(
            Invoice.status == FINAL,
            _within(Invoice.final_at, window),
            _within(Invoice.settled_at, window),
            Invoice.id.in_(paid),
            Invoice.id.in_(lowered),
        ),
    )


def _expected(table: type[Payment] | type[Refund], name: str, window: Window) -> Any:
    return select(table.external_id, table.id).where(
        table.provider == name,
        or_(
            and_(table.status == settlement.SUCCEEDED, _within(table.created_at, window)),
            table.status == settlement.PENDING,
        ),
    )


def _known(session: Session, found: ProviderSnapshot) -> set[str]:
    """Those refunded or disputed payments of the snapshot that are ours."""
    names = {each.payment_external_id for each in found.refunds.values()}
    names |= {each.payment_external_id for each in found.disputes.values()}
    query = select(Payment.external_id).where(
        Payment.provider == found.name, Payment.external_id.in_(names - found.payments.keys())
    )
    return {str(each) for each in session.scalars(query)}


def _within(column: Any, window: Window) -> ColumnElement[bool]:
    return and_(column >= window.since, column < window.until)
