"""Compares the ledger with a snapshot of the provider (`theirs.fetch`): invoices, payments, refunds,
disputes, and the cash posted for each. Every difference is listed, except those that a waiting command
or event will resolve. `catch_up` posts provider records whose event was lost.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing import settlement
from billing.findings import Difference, amount, lost
from billing.invoices import FINAL, UNCOLLECTIBLE, VOID
from billing.models import (
    BillingAccount,
    CreditNote,
    Dispute,
    Invoice,
    Payment,
    PaymentCommand,
    PaymentWebhook,
    Refund,
)
from billing.payments import booking, meters
from billing.payments.base import (
    InvoiceState,
    PaymentState,
    Record,
    RefundState,
    Status,
)
from billing.payments.theirs import Theirs
from core.clock import Clock
from core.database import Database
from core.errors import TollhouseError
from core.money import units_of_minor


@dataclass(frozen=True, slots=True)
class Finding:
    difference: Difference
    record: Record | None = None  # posting it may resolve the difference


def differences(session: Session, theirs: Theirs) -> list[Difference]:
    return [each.difference for each in findings(session, theirs)]


def findings(session: Session, theirs: Theirs) -> Iterator[Finding]:
    moving = _moving(session, theirs.name)
    for check in (_invoices, _payments, _refunds, _disputes):
        yield from check(session, theirs, moving)
    yield from _unsent(session, theirs.name)
    for each in meters.differences(session, theirs.name, theirs.at):
        yield Finding(each)
    yield from _cash(session, theirs.name)


def catch_up(database: Database, clock: Clock, theirs: Theirs) -> int:
    """Post provider records that the ledger lacks; returns how many were posted."""
    with database.read() as session:
        records = [each.record for each in findings(session, theirs) if each.record is not None]
    booked = 0
    for record in records:
        try:
            with database.transaction() as session:
                _book(session, theirs.name, record, clock)
            booked += 1
        except (booking.NotYet, booking.NotOurs, TollhouseError):
            continue  # it stays listed as a difference
    return booked


def _book(session: Session, name: str, record: Record, clock: Clock) -> None:
    now = clock.now()
    if isinstance(record, InvoiceState):
        booking.invoice(session, name, record, now)
    elif isinstance(record, PaymentState):
        booking.payment(session, name, record, now)
    elif isinstance(record, RefundState):
        booking.refund(session, name, record, now)
    else:
        booking.dispute(session, name, record, now)


def _moving(session: Session, name: str) -> set[str]:
    """Ids, ours and the provider's, with a waiting command or event."""
    told = session.scalars(
        select(PaymentCommand.subject_id).where(
            PaymentCommand.provider == name,
            PaymentCommand.done_at.is_(None),
            PaymentCommand.failed.is_(False),
        )
    )
    heard = session.scalars(
        select(PaymentWebhook.subject_id).where(
            PaymentWebhook.provider == name,
            PaymentWebhook.done_at.is_(None),
            PaymentWebhook.parked.is_(None),
        )
    )
    return set(told) | set(heard)


def _lost(check: str, message: str, name: str, record: Record | None = None) -> Finding:
    return Finding(lost(check, message, [name])[0], record)


def _differs(
    check: str, message: str, minor: int, currency: str, name: str, record: Record | None = None
) -> Finding:
    return Finding(amount(check, message, units_of_minor(minor, currency), [name]), record)


def _invoices(session: Session, theirs: Theirs, moving: set[str]) -> Iterator[Finding]:
    check = f"invoices/{theirs.name}"
    rows = session.scalars(select(Invoice).where(Invoice.external_id.is_not(None)))
    ours = {str(each.external_id): each for each in rows}
    sent = set(
        session.scalars(
            select(PaymentCommand.subject_id).where(
                PaymentCommand.provider == theirs.name, PaymentCommand.kind == "invoice"
            )
        )
    )
    lowered = _lowered(session)
    for name, invoice in ours.items():
        if invoice.id in moving or name in moving or invoice.id not in sent:
            continue
        there = theirs.invoices.get(name)
        if there is None:
            if name not in theirs.looked_for:
                continue
            yield _lost(check, f"{theirs.name} has no {name} for invoice {invoice.label}", name)
            continue
        yield from _one_invoice(check, invoice, there, lowered.get(invoice.id, 0))
    copies: dict[str, list[InvoiceState]] = defaultdict(list)
    for name, there in theirs.invoices.items():
        if there.invoice_id in moving or name in moving:
            continue
        if there.status != VOID:
            copies[there.invoice_id].append(there)
        if name not in ours:
            said = (
                f"{name} at {theirs.name} ({there.status}) names invoice {there.invoice_id}, "
                "which has another external id"
            )
            yield _lost(check, said, name, there)
    for invoice_id, every in copies.items():
        if len(every) > 1:
            names = tuple(each.external_id for each in every)
            said = f"invoice {invoice_id} exists {len(every)} times at {theirs.name}"
            yield Finding(Difference(check, "duplicated", said, len(every) - 1, 0, names))


def _one_invoice(
    check: str, invoice: Invoice, there: InvoiceState, lowered: int
) -> Iterator[Finding]:
    name, currency = there.external_id, invoice.currency
    if there.currency != currency or there.total_minor != invoice.due_minor:
        said = (
            f"invoice {invoice.label} is over {invoice.due_minor} {currency} here, "
            f"{there.total_minor} {there.currency} at the provider"
        )
        yield _differs(check, said, there.total_minor - invoice.due_minor, currency, name)
    left = max(0, invoice.due_minor - lowered)
    wanted = "paid" if left == 0 else "open"
    if invoice.status in (VOID, UNCOLLECTIBLE):
        wanted, left = invoice.status, 0
    if there.status != wanted or there.remaining_minor != left:
        said = (
            f"invoice {invoice.label} is {wanted} with {left} open here, {there.status} with "
            f"{there.remaining_minor} open at the provider"
        )
        yield _differs(check, said, there.remaining_minor - left, currency, name, there)


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


def _payments(session: Session, theirs: Theirs, moving: set[str]) -> Iterator[Finding]:
    check = f"payments/{theirs.name}"
    rows = session.scalars(
        select(Payment).where(
            Payment.provider == theirs.name, Payment.status == settlement.SUCCEEDED
        )
    ).all()
    ours = {each.external_id or each.id: each for each in rows}
    paid_by_invoice = {p.external_id: i for i in theirs.invoices.values() for p in i.payments}
    charges: dict[str, list[str]] = defaultdict(list)
    for name, there in theirs.payments.items():
        invoice = paid_by_invoice.get(name)
        around = {name, there.payment_id, invoice.external_id if invoice else name}
        around.add(invoice.invoice_id if invoice else name)
        if there.status is not Status.SUCCEEDED or around & moving:
            continue
        if there.payment_id:
            charges[there.payment_id].append(name)
        mine = ours.get(name)
        if mine is None:
            said = f"payment {name} of {there.amount_minor} {there.currency} is not in the ledger"
            yield _lost(check, said, name, invoice or there)
        elif (mine.amount_minor, mine.currency) != (there.amount_minor, there.currency):
            said = (
                f"payment {name} is over {mine.amount_minor} {mine.currency} here, "
                f"{there.amount_minor} {there.currency} at the provider"
            )
            off = there.amount_minor - mine.amount_minor
            yield _differs(check, said, off, mine.currency, name)
    for payment_id, names in charges.items():
        if len(names) > 1:
            said = f"payment {payment_id} was charged {len(names)} times"
            yield Finding(Difference(check, "duplicated", said, len(names) - 1, 0, tuple(names)))
    for name, mine in ours.items():
        there_now = theirs.payments.get(name)
        if mine.id in moving or name in moving:
            continue
        if there_now is None and name not in theirs.looked_for:
            continue
        if there_now is None or there_now.status is not Status.SUCCEEDED:
            said = f"payment {mine.id} of {mine.amount_minor} is posted but missing as {name} there"
            yield _lost(check, said, name)


def _refunds(session: Session, theirs: Theirs, moving: set[str]) -> Iterator[Finding]:
    check = f"refunds/{theirs.name}"
    rows = session.scalars(select(Refund).where(Refund.provider == theirs.name)).all()
    ours = {each.external_id or each.id: each for each in rows}
    references = {each.reference for each in rows if each.id in moving}
    for name, there in theirs.refunds.items():
        mine = ours.get(name)
        if name in moving or there.reference in references or (mine and mine.id in moving):
            continue
        failed = there.status is Status.FAILED
        if mine is None:
            if not failed:
                yield _lost(
                    check, f"refund {name} of {there.amount_minor} is not posted", name, there
                )
        elif failed != (mine.status == settlement.FAILED):
            said = f"refund {name} is {mine.status} here, {there.status} at the provider"
            yield _differs(check, said, there.amount_minor, mine.currency, name, there)
        elif mine.amount_minor != there.amount_minor:
            said = f"refund {name} is over {mine.amount_minor} here, {there.amount_minor} at the provider"
            yield _differs(check, said, there.amount_minor - mine.amount_minor, mine.currency, name)
    for name, mine in ours.items():
        missing = name in theirs.looked_for - theirs.refunds.keys()
        gone = missing and mine.status != settlement.FAILED
        if gone and mine.id not in moving and name not in moving:
            yield _lost(
                check, f"refund {mine.reference} is posted but missing at the provider", name
            )


def _disputes(session: Session, theirs: Theirs, moving: set[str]) -> Iterator[Finding]:
    check = f"disputes/{theirs.name}"
    rows = session.scalars(select(Dispute).where(Dispute.provider == theirs.name))
    known = {each.external_id: each for each in rows}
    for name, there in theirs.disputes.items():
        mine = known.get(name)
        if name in moving:
            continue
        if mine is None:
            yield _lost(check, f"dispute {name} of {there.amount_minor} is not posted", name, there)
        elif (mine.withdrawn, mine.amount_minor) != (there.withdrawn, there.amount_minor):
            said = f"dispute {name} is {mine.status} here, {there.status} at the provider"
            yield _differs(check, said, there.amount_minor, mine.currency, name, there)
    for name in (known.keys() & theirs.looked_for) - theirs.disputes.keys() - moving:
        yield _lost(check, f"dispute {name} is posted but missing at the provider", name)


def _unsent(session: Session, name: str) -> Iterator[Finding]:
    """Commands that the provider rejected, and final invoices without a command."""
    check = f"outbox/{name}"
    refused = session.scalars(
        select(PaymentCommand).where(
            PaymentCommand.provider == name, PaymentCommand.failed.is_(True)
        )
    )
    for each in refused:
        yield _lost(check, f"command {each.kind} was rejected: {each.last_error}", each.subject_id)
    planned = select(PaymentCommand.subject_id).where(
        PaymentCommand.provider == name, PaymentCommand.kind == "invoice"
    )
    rows = session.scalars(
        select(Invoice)
        .join(BillingAccount, BillingAccount.tenant_id == Invoice.tenant_id)
        .where(
            BillingAccount.collection == name,
            Invoice.status == FINAL,
            Invoice.due_minor > 0,
            Invoice.id.not_in(planned),
        )
    )
    for invoice in rows:
        yield _lost(check, f"invoice {invoice.label} was not sent to {name}", invoice.id)


def _cash(session: Session, name: str) -> Iterator[Finding]:
    """Compare the cash postings with each payment, refund and dispute."""
    check = f"{name}/ledger"
    cash = settlement.cash_by_reference(session)

    def _booked(references: Iterable[str]) -> int:
        return sum(cash.get(each, 0) for each in references)

    for paid in session.scalars(select(Payment).where(Payment.provider == name)):
        good = paid.status == settlement.SUCCEEDED
        wanted = units_of_minor(paid.amount_minor, paid.currency) if good else 0
        have = _booked((f"payment:{paid.id}", f"grant:payment:{paid.id}"))
        if have != wanted:
            said = f"the ledger has {have} units of cash for payment {paid.id}, expected {wanted}"
            yield Finding(amount(check, said, have - wanted, [paid.external_id or paid.id]))
    for made in session.scalars(select(Refund).where(Refund.provider == name)):
        gone = 0 if made.status == settlement.FAILED else made.amount_minor
        yield from _went(check, f"refund:{made.reference}", gone, made.currency, _booked)
    for each in session.scalars(select(Dispute).where(Dispute.provider == name)):
        gone = each.amount_minor if each.withdrawn else 0
        yield from _went(check, f"dispute:{each.external_id}", gone, each.currency, _booked)


def _went(
    check: str, reference: str, minor: int, currency: str, booked: Callable[[Iterable[str]], int]
) -> Iterator[Finding]:
    wanted = -units_of_minor(minor, currency)
    have = booked((reference, f"back:{reference}", f"grant:back:{reference}"))
    if have != wanted:
        said = f"the ledger has {have} units of cash for {reference}, expected {wanted}"
        yield Finding(amount(check, said, have - wanted, [reference]))
