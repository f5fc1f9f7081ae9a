"""Dunning of overdue invoices: reminders, card retries, and suspension after the plan's grace days.
Service resumes as soon as the invoice is paid, written off or void.

A case opens when the invoice is overdue or its card is declined, whichever comes first. Every step
depends only on the age of the case, so a run that was interrupted can be repeated.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import exists, or_, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.invoicing import metered, open_amounts
from billing.invoicing.invoices import FINAL, UNCOLLECTIBLE, VOID
from billing.invoicing.tables import Invoice
from billing.notices import outbox, webhooks
from billing.payments import commands, settlement
from billing.payments.base import PaymentProvider
from billing.payments.tables import DunningCase, Payment, PaymentCommand
from billing.periods import local_day
from billing.subscriptions import subscriptions
from core.clock import Clock
from core.database import Database
from core.money import format_minor
from core.tenants.organisations import set_unpaid

# Days after a case opens on which the tenant is reminded and a declined card is retried.
REMINDERS = (0, 3, 7, 14, 21)
BANK_ANSWERS = timedelta(days=21)  # the longest that a debit stays in process
METERED = metered.WAY  # Stripe prices and bills the usage of these accounts itself
ACTIVE, PAST_DUE, SUSPENDED = "active", "past_due", "suspended"


@dataclass
class DunningResult:
    opened: int = 0
    reminded: int = 0
    suspended: int = 0
    closed: int = 0


def run(
    database: Database, clock: Clock, provider: PaymentProvider, *, retries: bool = True
) -> DunningResult:
    """Advance every open case. `retries=False` leaves retrying declined cards to the provider."""
    result = DunningResult()
    with database.transaction() as session:
        result.opened = open_cases(session, clock.now(), provider)
    with database.read() as session:
        waiting = session.scalars(
            select(DunningCase.invoice_id)
            .where(DunningCase.closed_at.is_(None))
            .order_by(DunningCase.tenant_id, DunningCase.invoice_id)
        ).all()
    for invoice_id in waiting:
        with database.transaction() as session:
            _advance(session, clock, provider, invoice_id, retries, result)
    return result


def open_cases(session: Session, now: datetime, provider: PaymentProvider) -> int:
    """Open a case for each open invoice that is overdue or whose card was declined. A closed case
    reopens if a payment was reversed.
    """
    refused = exists(
        select(Payment.id).where(
            Payment.invoice_id == Invoice.id, Payment.status == settlement.FAILED
        )
    )
    open_case = exists(
        select(DunningCase.invoice_id).where(
            DunningCase.invoice_id == Invoice.id, DunningCase.closed_at.is_(None)
        )
    )
    found = session.scalars(
        select(Invoice)
        .where(
            Invoice.status == FINAL,
            Invoice.metered.is_(False),
            or_(Invoice.due_at <= now, refused),
            ~open_case,
        )
        .order_by(Invoice.id)
    ).all()
    owed = [
        each
        for each in found
        if open_amounts.open_minor(each) > 0
        and not _in_process(session, each, now)
        and not _unasked(session, each, provider)
    ]
    for invoice in owed:
        case = session.get(DunningCase, invoice.id)
        if case is None:
            case = DunningCase(invoice_id=invoice.id, tenant_id=invoice.tenant_id)
            session.add(case)
        case.step, case.opened_at, case.next_at = 0, now, now
        case.suspended_at = case.closed_at = case.outcome = None
    return len(owed)


def settle(database: Database, clock: Clock, tenant_ids: Iterable[str] | None = None) -> int:
    """Close the cases of settled invoices and resume service; returns how many were closed."""
    query = (
        select(DunningCase.invoice_id)
        .join(Invoice, Invoice.id == DunningCase.invoice_id)
        .where(DunningCase.closed_at.is_(None), Invoice.status != FINAL)
        .order_by(DunningCase.tenant_id, DunningCase.invoice_id)
    )
    if tenant_ids is not None:
        query = query.where(DunningCase.tenant_id.in_(set(tenant_ids)))
    with database.read() as session:
        found = session.scalars(query).all()
    for invoice_id in found:
        with database.transaction() as session:
            invoice = session.get_one(Invoice, invoice_id)
            account = lock_account(session, invoice.tenant_id)
            case = session.get_one(DunningCase, invoice_id, populate_existing=True)
            if case.closed_at is None and invoice.status != FINAL:
                _close(session, clock, case, invoice, account)
    return len(found)


def suspend_at(session: Session, invoice: Invoice, now: datetime) -> datetime | None:
    """When the tenant is suspended if the invoice stays unpaid; None is never. A tenant that has
    cancelled or paused is under the terms of its last plan."""
    held = subscriptions.read_subscriptions(session, [invoice.tenant_id])
    plan = subscriptions.latest_plan(held.get(invoice.tenant_id, []), now)
    if plan is None or plan.suspend_after_days is None or invoice.due_at is None:
        return None
    return invoice.due_at + timedelta(days=plan.suspend_after_days)


def _advance(
    session: Session,
    clock: Clock,
    provider: PaymentProvider,
    invoice_id: str,
    retries: bool,
    result: DunningResult,
) -> None:
    now = clock.now()
    invoice = session.get_one(Invoice, invoice_id)
    account = lock_account(session, invoice.tenant_id)
    session.refresh(invoice)
    case = session.get_one(DunningCase, invoice_id, populate_existing=True)
    if case.closed_at is not None:
        return
    if invoice.status != FINAL or open_amounts.open_minor(invoice) <= 0:
        _close(session, clock, case, invoice, account)
        result.closed += 1
        return
    if _in_process(session, invoice, now) or _unasked(session, invoice, provider):
        return
    suspends_at = suspend_at(session, invoice, now)
    if account.status == ACTIVE:
        account.status = PAST_DUE
    if case.next_at is not None and case.next_at <= now:
        _remind(session, case, invoice, account, suspends_at, now)
        ours = account.collection in commands.ways_of(provider.name) and provider.collects
        if retries and ours and case.step > 0:
            turn = f"{case.opened_at:%Y%m%d}.{case.step}"
            commands.collect_again(session, provider.name, invoice, turn, now)
        case.step += 1
        case.next_at = _next(case, now)
        result.reminded += 1
    if suspends_at is not None and suspends_at <= now and case.suspended_at is None:
        case.suspended_at = now
        account.status = SUSPENDED
        set_unpaid(session, clock, invoice.tenant_id, True)
        _notify(session, case, invoice, account, "suspended", now, suspends_at=suspends_at)
        result.suspended += 1
    session.flush()


def _in_process(session: Session, invoice: Invoice, now: datetime) -> bool:
    """A bank is still to answer: neither a reminder nor a retry nor a suspension is due."""
    pending = select(Payment.id).where(
        Payment.invoice_id == invoice.id,
        Payment.status == settlement.PENDING,
        Payment.created_at > now - BANK_ANSWERS,
    )
    return session.scalar(pending.limit(1)) is not None


def _unasked(session: Session, invoice: Invoice, provider: PaymentProvider) -> bool:
    """The provider collects this invoice and was not asked yet: it may be paid, as one is that was
    issued before a restore, or its customer may have a card that nobody tried."""
    account = session.get(BillingAccount, invoice.tenant_id)
    ours = account is not None and account.collection in commands.ways_of(provider.name)
    if not (ours and provider.collects):
        return False
    asked = select(PaymentCommand.id).where(
        PaymentCommand.idempotency_key == commands.first_collection(invoice.id),
        PaymentCommand.done_at.is_not(None),
    )
    if session.scalar(asked) is not None:
        return False
    refused = select(PaymentCommand.id).where(  # no index has it: asked of few invoices
        PaymentCommand.subject_id == invoice.id, PaymentCommand.failed.is_(True)
    )
    return session.scalar(refused.limit(1)) is None


def _next(case: DunningCase, now: datetime) -> datetime | None:
    """The day of the next reminder; reminders missed in a long outage are skipped."""
    for step in range(case.step, len(REMINDERS)):
        at = case.opened_at + timedelta(days=REMINDERS[step])
        if at > now:
            case.step = step
            return at
    return None


def _close(
    session: Session, clock: Clock, case: DunningCase, invoice: Invoice, account: BillingAccount
) -> None:
    now = clock.now()
    outcomes = {VOID: "voided", UNCOLLECTIBLE: "written_off"}
    case.closed_at, case.next_at = now, None
    case.outcome = outcomes.get(invoice.status, "paid")
    session.flush()
    others = session.scalars(
        select(DunningCase).where(
            DunningCase.tenant_id == case.tenant_id, DunningCase.closed_at.is_(None)
        )
    ).all()
    if any(each.suspended_at for each in others):
        return
    account.status = PAST_DUE if others else ACTIVE
    if set_unpaid(session, clock, case.tenant_id, False):
        _notify(session, case, invoice, account, "reinstated", now, suspends_at=None)
    session.flush()


def _remind(
    session: Session,
    case: DunningCase,
    invoice: Invoice,
    account: BillingAccount,
    suspends_at: datetime | None,
    now: datetime,
) -> None:
    _notify(
        session, case, invoice, account, f"reminder {case.step + 1}", now, suspends_at=suspends_at
    )


def _notify(
    session: Session,
    case: DunningCase,
    invoice: Invoice,
    account: BillingAccount,
    what: str,
    now: datetime,
    *,
    suspends_at: datetime | None,
) -> None:
    """Notify the account's email address and webhooks, once per step of a case."""
    left = format_minor(open_amounts.open_minor(invoice), invoice.currency)
    subjects = {
        "suspended": f"Service is suspended: invoice {invoice.label} is unpaid",
        "reinstated": f"Service is restored: invoice {invoice.label} is settled",
    }
    plain = f"Invoice {invoice.label} is unpaid: {left} {invoice.currency}"
    event = f"invoice.{what.partition(' ')[0]}"
    payload = {
        "event": event,
        "invoice": invoice.label,
        "open": left,
        "currency": invoice.currency,
        "due": local_day(invoice.due_at, invoice.timezone) if invoice.due_at else "",
        "service_ends": local_day(suspends_at, invoice.timezone) if suspends_at else "",
        "pay_at": invoice.pay_page if invoice.status == FINAL else "",
    }
    subject = subjects.get(what, plain)
    dedupe = f"dunning:{invoice.id}:{case.opened_at:%Y%m%d%H%M%S}:{what}"
    webhooks.notify(
        session, [webhooks.Notification(invoice.tenant_id, event, subject, dedupe, payload)], now
    )
    outbox.put(
        session,
        tenant_id=invoice.tenant_id,
        subject=subject,
        payload=payload,
        dedupe=dedupe,
        emails=[account.email] if account.email else [],
        now=now,
    )
