"""Compares the ledger with a snapshot of the provider (`snapshot.fetch`): invoices, payments, refunds,
disputes, and the cash posted for each. Every difference is listed, except those that a waiting command
or event will resolve. `catch_up` posts provider records whose event was lost.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.differences import Difference, amount, lost
from billing.invoicing.invoices import FINAL, UNCOLLECTIBLE, VOID
from billing.invoicing.tables import CreditNote, Invoice
from billing.payments import commands, meters, posting, settlement
from billing.payments.base import (
    InvoiceState,
    PaymentState,
    Record,
    RefundState,
    Status,
)
from billing.payments.provider_snapshot import ProviderSnapshot
from billing.payments.tables import Dispute, Payment, PaymentCommand, PaymentWebhook, Refund
from core.clock import Clock
from core.database import Database
from core.errors import TollhouseError
from core.money import units_of_minor


@dataclass(frozen=True, slots=True)
class ProviderDifference:
    difference: Difference
    record: Record | None = None  # posting it may resolve the difference


def differences(session: Session, snapshot: ProviderSnapshot) -> list[Difference]:
    return [each.difference for each in find_differences(session, snapshot)]


def find_differences(session: Session, snapshot: ProviderSnapshot) -> Iterator[ProviderDifference]:
    in_progress = _in_progress(session, snapshot.name)
    for check in (_invoices, _payments, _refunds, _disputes):
        yield from check(session, snapshot, in_progress)
    yield from _unsent(session, snapshot.name)
    for each in meters.differences(session, snapshot.name, snapshot.at):
        yield ProviderDifference(each)
    yield from _cash(session, snapshot.name)


def catch_up(database: Database, clock: Clock, snapshot: ProviderSnapshot) -> int:
    """Post provider records that the ledger lacks; returns how many were posted."""
    with database.read() as session:
        records = [
            each.record for each in find_differences(session, snapshot) if each.record is not None
        ]
    posted = 0
    for record in records:
        try:
            with database.transaction() as session:
                _post(session, snapshot.name, record, clock)
            posted += 1
        except (posting.UnknownObject, posting.ForeignObject, TollhouseError):
            continue  # it stays listed as a difference
    return posted


def _post(session: Session, name: str, record: Record, clock: Clock) -> None:
    now = clock.now()
    if isinstance(record, InvoiceState):
        posting.invoice(session, name, record, now)
    elif isinstance(record, PaymentState):
        posting.payment(session, name, record, now)
    elif isinstance(record, RefundState):
        posting.refund(session, name, record, now)
    else:
        posting.dispute(session, name, record, now)


def _in_progress(session: Session, name: str) -> set[str]:
    """Ids, ours and the provider's, with a waiting command or event."""
    command_subjects = session.scalars(
        select(PaymentCommand.subject_id).where(
            PaymentCommand.provider == name,
            PaymentCommand.done_at.is_(None),
            PaymentCommand.failed.is_(False),
        )
    )
    event_subjects = session.scalars(
        select(PaymentWebhook.subject_id).where(
            PaymentWebhook.provider == name,
            PaymentWebhook.done_at.is_(None),
            PaymentWebhook.parked.is_(None),
        )
    )
    return set(command_subjects) | set(event_subjects)


def _missing(
    check: str, message: str, name: str, record: Record | None = None
) -> ProviderDifference:
    return ProviderDifference(lost(check, message, [name])[0], record)


def _differs(
    check: str, message: str, minor: int, currency: str, name: str, record: Record | None = None
) -> ProviderDifference:
    return ProviderDifference(
        amount(check, message, units_of_minor(minor, currency), [name]), record
    )


def _invoices(
    session: Session, snapshot: ProviderSnapshot, in_progress: set[str]
) -> Iterator[ProviderDifference]:
    check = f"invoices/{snapshot.name}"
    rows = session.scalars(select(Invoice).where(Invoice.external_id.is_not(None)))
    ours = {str(each.external_id): each for each in rows}
    sent = set(
        session.scalars(
            select(PaymentCommand.subject_id).where(
                PaymentCommand.provider == snapshot.name, PaymentCommand.kind == "invoice"
            )
        )
    )
    lowered = _lowered(session)
    for name, invoice in ours.items():
        if invoice.id in in_progress or name in in_progress or invoice.id not in sent:
            continue
        there = snapshot.invoices.get(name)
        if there is None:
            if name not in snapshot.expected_ids:
                continue
            yield _missing(
                check, f"{snapshot.name} has no {name} for invoice {invoice.label}", name
            )
            continue
        yield from _one_invoice(check, invoice, there, lowered.get(invoice.id, 0))
    copies: dict[str, list[InvoiceState]] = defaultdict(list)
    for name, there in snapshot.invoices.items():
        if there.invoice_id in in_progress or name in in_progress:
            continue
        if there.status != VOID:
            copies[there.invoice_id].append(there)
        if name not in ours:
            message = (
                f"{name} at {snapshot.name} ({there.status}) names invoice {there.invoice_id}, "
                "which has another external id"
            )
            yield _missing(check, message, name, there)
    for invoice_id, every in copies.items():
        if len(every) > 1:
            names = tuple(each.external_id for each in every)
            message = f"invoice {invoice_id} exists {len(every)} times at {snapshot.name}"
            yield ProviderDifference(
                Difference(check, "duplicated", message, len(every) - 1, 0, names)
            )


def _one_invoice(
    check: str, invoice: Invoice, there: InvoiceState, lowered: int
) -> Iterator[ProviderDifference]:
    name, currency = there.external_id, invoice.currency
    if there.currency != currency or there.total_minor != invoice.due_minor:
        message = (
            f"invoice {invoice.label} is over {invoice.due_minor} {currency} here, "
            f"{there.total_minor} {there.currency} at the provider"
        )
        yield _differs(check, message, there.total_minor - invoice.due_minor, currency, name)
    left = max(0, invoice.due_minor - lowered)
    wanted = "paid" if left == 0 else "open"
    # A payment that was on its way when the invoice became void is the customer's credit.
    is_credit = invoice.status == VOID and left == 0 and there.status == "paid"
    if invoice.status in (VOID, UNCOLLECTIBLE) and not is_credit:
        wanted, left = invoice.status, 0
    if there.status != wanted or there.remaining_minor != left:
        message = (
            f"invoice {invoice.label} is {wanted} with {left} open here, {there.status} with "
            f"{there.remaining_minor} open at the provider"
        )
        yield _differs(check, message, there.remaining_minor - left, currency, name, there)


def _lowered(session: Session) -> dict[str, int]:
    """Minor units by which credit notes and payments have lowered each invoice. Refunds do not
    raise the open amount at the provider again.
    """
    sums: dict[str, int] = defaultdict(int)
    for invoice_id, minor in session.execute(
        select(
            CreditNote.invoice_id, func.sum(CreditNote.net_minor + CreditNote.tax_minor)
        ).group_by(CreditNote.invoice_id)
    ):
        sums[invoice_id] += int(minor)
    for paid_id, minor in session.execute(
        select(Payment.invoice_id, func.sum(Payment.amount_minor))
        .where(Payment.status == settlement.SUCCEEDED, Payment.invoice_id.is_not(None))
        .group_by(Payment.invoice_id)
    ):
        sums[str(paid_id)] += int(minor)
    return sums


def _payments(
    session: Session, snapshot: ProviderSnapshot, in_progress: set[str]
) -> Iterator[ProviderDifference]:
    check = f"payments/{snapshot.name}"
    rows = session.scalars(
        select(Payment).where(
            Payment.provider == snapshot.name, Payment.status == settlement.SUCCEEDED
        )
    ).all()
    ours = {each.external_id or each.id: each for each in rows}
    paid_by_invoice = {p.external_id: i for i in snapshot.invoices.values() for p in i.payments}
    charges: dict[str, list[str]] = defaultdict(list)
    for name, there in snapshot.payments.items():
        invoice = paid_by_invoice.get(name)
        around = {name, there.payment_id, invoice.external_id if invoice else name}
        around.add(invoice.invoice_id if invoice else name)
        if there.status is not Status.SUCCEEDED or around & in_progress:
            continue
        if there.payment_id:
            charges[there.payment_id].append(name)
        own = ours.get(name)
        if own is None:
            message = (
                f"payment {name} of {there.amount_minor} {there.currency} is not in the ledger"
            )
            yield _missing(check, message, name, invoice or there)
        elif (own.amount_minor, own.currency) != (there.amount_minor, there.currency):
            message = (
                f"payment {name} is over {own.amount_minor} {own.currency} here, "
                f"{there.amount_minor} {there.currency} at the provider"
            )
            off = there.amount_minor - own.amount_minor
            yield _differs(check, message, off, own.currency, name)
    for payment_id, names in charges.items():
        if len(names) > 1:
            message = f"payment {payment_id} was charged {len(names)} times"
            yield ProviderDifference(
                Difference(check, "duplicated", message, len(names) - 1, 0, tuple(names))
            )
    for name, own in ours.items():
        there_now = snapshot.payments.get(name)
        if own.id in in_progress or name in in_progress:
            continue
        if there_now is None and name not in snapshot.expected_ids:
            continue
        if there_now is None or there_now.status is not Status.SUCCEEDED:
            message = (
                f"payment {own.id} of {own.amount_minor} is posted but missing as {name} there"
            )
            yield _missing(check, message, name)


def _refunds(
    session: Session, snapshot: ProviderSnapshot, in_progress: set[str]
) -> Iterator[ProviderDifference]:
    check = f"refunds/{snapshot.name}"
    rows = session.scalars(select(Refund).where(Refund.provider == snapshot.name)).all()
    ours = {each.external_id or each.id: each for each in rows}
    references = {each.reference for each in rows if each.id in in_progress}
    for name, there in snapshot.refunds.items():
        own = ours.get(name)
        if name in in_progress or there.reference in references or (own and own.id in in_progress):
            continue
        failed = there.status is Status.FAILED
        if own is None:
            if not failed:
                yield _missing(
                    check, f"refund {name} of {there.amount_minor} is not posted", name, there
                )
        elif failed != (own.status == settlement.FAILED):
            message = f"refund {name} is {own.status} here, {there.status} at the provider"
            yield _differs(check, message, there.amount_minor, own.currency, name, there)
        elif own.amount_minor != there.amount_minor:
            message = (
                f"refund {name} is over {own.amount_minor} here, "
                f"{there.amount_minor} at the provider"
            )
            yield _differs(
                check, message, there.amount_minor - own.amount_minor, own.currency, name
            )
    for name, own in ours.items():
        missing = name in snapshot.expected_ids - snapshot.refunds.keys()
        gone = missing and own.status != settlement.FAILED
        if gone and own.id not in in_progress and name not in in_progress:
            yield _missing(
                check, f"refund {own.reference} is posted but missing at the provider", name
            )


def _disputes(
    session: Session, snapshot: ProviderSnapshot, in_progress: set[str]
) -> Iterator[ProviderDifference]:
    check = f"disputes/{snapshot.name}"
    rows = session.scalars(select(Dispute).where(Dispute.provider == snapshot.name))
    known = {each.external_id: each for each in rows}
    for name, there in snapshot.disputes.items():
        own = known.get(name)
        if name in in_progress:
            continue
        if own is None:
            yield _missing(
                check, f"dispute {name} of {there.amount_minor} is not posted", name, there
            )
        elif (own.withdrawn, own.amount_minor) != (there.withdrawn, there.amount_minor):
            message = f"dispute {name} is {own.status} here, {there.status} at the provider"
            yield _differs(check, message, there.amount_minor, own.currency, name, there)
    for name in (known.keys() & snapshot.expected_ids) - snapshot.disputes.keys() - in_progress:
        yield _missing(check, f"dispute {name} is posted but missing at the provider", name)


def _unsent(session: Session, name: str) -> Iterator[ProviderDifference]:
    """Commands that the provider rejected, and final invoices without a command."""
    check = f"outbox/{name}"
    refused = session.scalars(
        select(PaymentCommand).where(
            PaymentCommand.provider == name, PaymentCommand.failed.is_(True)
        )
    )
    for each in refused:
        yield _missing(
            check, f"command {each.kind} was rejected: {each.last_error}", each.subject_id
        )
    planned = select(PaymentCommand.subject_id).where(
        PaymentCommand.provider == name, PaymentCommand.kind == "invoice"
    )
    rows = session.scalars(
        select(Invoice)
        .join(BillingAccount, BillingAccount.tenant_id == Invoice.tenant_id)
        .where(
            BillingAccount.collection.in_(commands.ways_of(name)),
            Invoice.metered.is_(False),
            Invoice.status == FINAL,
            Invoice.due_minor > 0,
            Invoice.id.not_in(planned),
        )
    )
    for invoice in rows:
        yield _missing(check, f"invoice {invoice.label} was not sent to {name}", invoice.id)


def _cash(session: Session, name: str) -> Iterator[ProviderDifference]:
    """Compare the cash postings with each payment, refund and dispute."""
    check = f"{name}/ledger"
    cash = settlement.cash_by_reference(session)

    def _posted_cash(references: Iterable[str]) -> int:
        return sum(cash.get(each, 0) for each in references)

    for paid in session.scalars(select(Payment).where(Payment.provider == name)):
        good = paid.status == settlement.SUCCEEDED
        wanted = units_of_minor(paid.amount_minor, paid.currency) if good else 0
        have = _posted_cash((f"payment:{paid.id}", f"grant:payment:{paid.id}"))
        if have != wanted:
            message = (
                f"the ledger has {have} units of cash for payment {paid.id}, expected {wanted}"
            )
            yield ProviderDifference(
                amount(check, message, have - wanted, [paid.external_id or paid.id])
            )
    for made in session.scalars(select(Refund).where(Refund.provider == name)):
        gone = 0 if made.status == settlement.FAILED else made.amount_minor
        yield from _withdrawn_cash(
            check, f"refund:{made.reference}", gone, made.currency, _posted_cash
        )
    for each in session.scalars(select(Dispute).where(Dispute.provider == name)):
        gone = each.amount_minor if each.withdrawn else 0
        yield from _withdrawn_cash(
            check, f"dispute:{each.external_id}", gone, each.currency, _posted_cash
        )


def _withdrawn_cash(
    check: str, reference: str, minor: int, currency: str, posted: Callable[[Iterable[str]], int]
) -> Iterator[ProviderDifference]:
    wanted = -units_of_minor(minor, currency)
    have = posted((reference, f"back:{reference}", f"grant:back:{reference}"))
    if have != wanted:
        message = f"the ledger has {have} units of cash for {reference}, expected {wanted}"
        yield ProviderDifference(amount(check, message, have - wanted, [reference]))
