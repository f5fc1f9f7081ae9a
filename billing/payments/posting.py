"""Posts the state of a provider's invoices, payments, refunds and disputes to the ledger.

Each change is posted once, in any order of arrival, because the current state is posted.
"""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.invoicing.tables import DRAFT, Invoice
from billing.payments import commands, settlement, withdrawals
from billing.payments.base import (
    DisputeState,
    InvoiceState,
    Method,
    PaymentState,
    RefundState,
    Status,
)
from billing.payments.tables import (
    Dispute,
    DunningCase,
    Payment,
    PaymentCustomer,
    PaymentMethod,
    Refund,
)
from core.ids import new_id


class UnknownObject(Exception):
    """The record refers to an object that does not exist here, perhaps not yet."""


class ForeignObject(Exception):
    """The record belongs to something else in the same provider account."""


def invoice(session: Session, name: str, state: InvoiceState, at: datetime) -> Invoice:
    """Post the payments of an invoice and store its external id. Payments of a draft wait until it is
    final: it was issued before a restore, and they would pay for later usage from the wallet."""
    ours = session.scalar(select(Invoice).where(Invoice.external_id == state.external_id))
    if ours is None:
        if not state.invoice_id:
            raise ForeignObject(f"invoice {state.external_id}")
        ours = session.get(Invoice, state.invoice_id)
        if ours is None:
            raise UnknownObject(
                f"{state.external_id} names invoice {state.invoice_id}, which does not exist here."
            )
    lock_account(session, ours.tenant_id)
    if ours.status == DRAFT:
        raise UnknownObject(f"{state.external_id} is of invoice {ours.id}, which is a draft here.")
    if ours.external_id is None:
        ours.external_id = state.external_id
    ours.pay_page = state.page or ours.pay_page
    for each in state.payments:
        _of_invoice(session, name, ours, each, at)
    return ours


def payment(session: Session, name: str, state: PaymentState, at: datetime) -> None:
    """Post a charge that we requested, or a payment of a known invoice."""
    found = _payment(session, name, state.external_id)
    if found is None and state.payment_id:
        found = session.get(Payment, state.payment_id)
        if found is None:
            raise UnknownObject(
                f"{state.external_id} names payment {state.payment_id}, which does not exist here."
            )
    if found is None:
        raise ForeignObject(
            f"payment {state.external_id}"
        )  # or part of an invoice, which has its own event
    lock_account(session, found.tenant_id)
    if state.external_id and found.external_id is None:
        found.external_id = state.external_id
    _settle(session, found, state, at)


def refund(session: Session, name: str, state: RefundState, at: datetime) -> None:
    """Post a refund that we requested, or one created at the provider."""
    made = session.scalar(
        select(Refund).where(Refund.provider == name, Refund.external_id == state.external_id)
    )
    if made is None and state.reference:
        made = session.scalar(select(Refund).where(Refund.reference == state.reference))
    if made is None:
        paid = _payment(session, name, state.payment_external_id)
        if paid is None or paid.status != settlement.SUCCEEDED:
            raise UnknownObject(
                f"{state.external_id} belongs to payment {state.payment_external_id}, "
                "which has not succeeded here."
            )
        if state.status is Status.FAILED:
            return
        made = settlement.refund(
            session,
            paid,
            state.amount_minor,
            f"{name}:{state.external_id}",
            at,
            reason="created at the provider",
            external_id=state.external_id,
            status=state.status.value,
            beyond_wallet=True,
        )
    made.external_id = made.external_id or state.external_id or None
    if state.status is Status.FAILED:
        settlement.refund_failed(session, made, state.failure or "no reason given", at)
    elif made.status != settlement.FAILED:
        made.status = state.status.value


def dispute(session: Session, name: str, state: DisputeState, at: datetime) -> None:
    """Post a dispute: the money is withdrawn while it is open, and for good if it is lost."""
    paid = _payment(session, name, state.payment_external_id)
    if paid is None or paid.status != settlement.SUCCEEDED:
        raise UnknownObject(
            f"{state.external_id} belongs to payment {state.payment_external_id}, "
            "which has not succeeded here."
        )
    lock_account(session, paid.tenant_id)
    found = session.scalar(
        select(Dispute).where(Dispute.provider == name, Dispute.external_id == state.external_id)
    )
    if found is None:
        found = Dispute(
            id=new_id("dis"),
            payment_id=paid.id,
            tenant_id=paid.tenant_id,
            provider=name,
            external_id=state.external_id,
            currency=state.currency,
            amount_minor=state.amount_minor,
            status=state.status,
            opened_at=state.at or at,
            withdrawn=False,
        )
        session.add(found)
    reference = f"dispute:{found.external_id}"
    if state.withdrawn and not found.withdrawn:
        reason = "withdrawn by the customer's bank"
        cause = withdrawals.Withdrawal(reference, at, withdrawals.DISPUTE, reason, True)
        withdrawals.withdraw(session, paid, state.amount_minor, cause)
    elif found.withdrawn and not state.withdrawn:
        withdrawals.reverse_withdrawal(session, paid, found.amount_minor, reference, at)
    found.withdrawn, found.status = state.withdrawn, state.status
    if state.status != "open":
        found.closed_at = found.closed_at or at


def customer(
    session: Session, name: str, customer_id: str, methods: list[Method], at: datetime
) -> None:
    """Store a customer's payment methods. A customer with one is collected from by the provider."""
    found = session.scalar(
        select(PaymentCustomer).where(
            PaymentCustomer.provider == name, PaymentCustomer.external_id == customer_id
        )
    )
    if found is None:
        raise ForeignObject(f"customer {customer_id}")
    account = lock_account(session, found.tenant_id)
    default = next((each.external_id for each in methods if each.is_default), None)
    if default is not None and default != found.default_method:
        _retry_open_invoices(session, name, found.tenant_id, default, at)
    found.default_method = default
    known = {
        each.external_id: each
        for each in session.scalars(
            select(PaymentMethod).where(
                PaymentMethod.tenant_id == found.tenant_id, PaymentMethod.provider == name
            )
        )
    }
    for each in methods:
        row = known.pop(each.external_id, None)
        if row is None:
            row = PaymentMethod(
                id=new_id("pm"),
                tenant_id=found.tenant_id,
                provider=name,
                external_id=each.external_id,
                created_at=at,
            )
            session.add(row)
        row.label, row.detached_at = each.label, None
    for gone in known.values():
        gone.detached_at = gone.detached_at or at
    _collect_by(account, name, bool(methods))


def _retry_open_invoices(
    session: Session, name: str, tenant_id: str, method: str, at: datetime
) -> None:
    """Retry overdue invoices at once with a new payment method."""
    waiting = session.scalars(
        select(Invoice)
        .join(DunningCase, DunningCase.invoice_id == Invoice.id)
        .where(
            DunningCase.tenant_id == tenant_id,
            DunningCase.closed_at.is_(None),
            Invoice.external_id.is_not(None),
        )
    )
    for each in waiting.all():
        commands.collect_again(session, name, each, method, at)


def _collect_by(account: BillingAccount, name: str, has_method: bool) -> None:
    if has_method and account.collection == "manual":
        account.collection = name


def _of_invoice(
    session: Session, name: str, ours: Invoice, state: PaymentState, at: datetime
) -> None:
    found = _payment(session, name, state.external_id)
    if found is None:
        found = settlement.begin_payment(
            session,
            tenant_id=ours.tenant_id,
            invoice_id=ours.id,
            amount_minor=state.amount_minor,
            currency=state.currency,
            provider=name,
            reference=f"{name}:{state.external_id}",
            at=at,
            external_id=state.external_id,
        )
    _settle(session, found, state, at)


def _settle(session: Session, found: Payment, state: PaymentState, at: datetime) -> None:
    if state.status is Status.SUCCEEDED:
        if found.status != settlement.SUCCEEDED:
            found.amount_minor = state.amount_minor  # a credit note may have lowered it
            session.flush()
        settlement.succeed(session, found, at)
    elif state.status is Status.FAILED:
        settlement.fail(session, found, state.failure or "no reason given", at)
    elif state.in_process and found.status == settlement.FAILED:
        found.status, found.failure, found.settled_at = (
            settlement.PENDING,
            None,
            None,
        )  # tried again


def _payment(session: Session, name: str, external_id: str) -> Payment | None:
    if not external_id:
        return None
    return session.scalar(
        select(Payment).where(Payment.provider == name, Payment.external_id == external_id)
    )
