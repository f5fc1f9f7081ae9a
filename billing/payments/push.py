"""Delivers outbox commands to the provider, one by one and outside any transaction. The result is
posted in the transaction that marks the command as done.

A worker leases a command; if it dies, the next worker looks for its effect before it retries. Commands
that may still succeed are retried forever, at intervals that double up to an hour. Commands that the
provider rejects are marked as failed with the reason, for a person to handle.
"""

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account
from billing.accounts.tables import BillingAccount
from billing.invoicing import open_amounts
from billing.invoicing.invoices import FINAL
from billing.invoicing.tables import Invoice
from billing.payments import commands, posting, settlement
from billing.payments.base import (
    Attempt,
    Charge,
    Customer,
    PaymentProvider,
    Refused,
    Status,
    TryLater,
    UsageReport,
)
from billing.payments.leases import MAX_UNANSWERED, NEXT_COMMAND, pause_s, take
from billing.payments.provider_bills import bill_of, methods_of
from billing.payments.tables import Payment, PaymentCommand, PaymentCustomer, Refund
from billing.restores.tables import Recovery
from core.clock import Clock
from core.database import Database, insert_new
from core.errors import TollhouseError

log = logging.getLogger("tollhouse.payments")
Post = Callable[[Session, datetime], None]
# Providers forget an idempotency key after a day. An older command may have been delivered before a
# restore, as may any command of a database that was restored: they look before they act.
KEYS_LAST = timedelta(hours=20)


@dataclass(frozen=True, slots=True)
class Job:
    """A leased command with what is needed to run it."""

    database: Database
    clock: Clock
    provider: PaymentProvider
    command: PaymentCommand
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Pushed:
    done: int = 0
    later: int = 0
    refused: int = 0


def push(
    database: Database,
    clock: Clock,
    provider: PaymentProvider,
    limit: int = 500,
    *,
    planned: Callable[[], object] = lambda: None,
) -> Pushed:
    """Plan commands, then deliver all that are due. `planned` is called before each delivery: it keeps
    outside the database what is about to reach the provider."""
    with database.transaction() as session:
        commands.plan(session, provider.name, clock.now())
    planned()
    first = deliver(database, clock, provider, limit)
    if not first.done:
        return first
    with database.transaction() as session:  # collections can be planned only after delivery
        more = commands.plan(session, provider.name, clock.now())
    if more:
        planned()
    rest = deliver(database, clock, provider, limit) if more else Pushed()
    return Pushed(first.done + rest.done, first.later + rest.later, first.refused + rest.refused)


def deliver(
    database: Database, clock: Clock, provider: PaymentProvider, limit: int = 500
) -> Pushed:
    done = later = refused = unanswered = 0
    with database.read() as session:
        restored = session.scalar(select(Recovery.id).limit(1)) is not None
    for _ in range(limit):
        if unanswered == MAX_UNANSWERED:
            break
        command = take(database, clock, NEXT_COMMAND, provider.name)
        if command is None:
            break
        job = _job(database, clock, provider, command)
        job.attempt.again |= restored or clock.now() - command.created_at > KEYS_LAST
        try:
            post = HANDLERS[command.kind](job)
            _finish(job, post)
            done += 1
            unanswered = 0
        except TryLater as error:
            _later(job, str(error), error.after_s)
            later += 1
            unanswered += 1
        except (posting.UnknownObject, posting.ForeignObject) as error:
            _later(job, f"{type(error).__name__}: {error}", None)
            later += 1
        except (Refused, TollhouseError) as error:
            _refuse(job, str(error))
            refused += 1
    return Pushed(done, later, refused)


def customer_of(database: Database, clock: Clock, provider: PaymentProvider, tenant_id: str) -> str:
    """The tenant's customer id at the provider, created if missing."""
    with database.read() as session:
        known = session.get(PaymentCustomer, (tenant_id, provider.name))
        if known is not None:
            return known.external_id
    with database.transaction() as session:
        account = ensure_account(session, tenant_id, clock.now())
        name, email = account.legal_name, account.email
    # The key includes name and email: reusing a key with other parameters is an error.
    digest = zlib.crc32(f"{name}|{email}".encode())
    attempt = Attempt(f"customer:{tenant_id}:{digest:08x}")
    made = provider.open_customer(Customer(tenant_id, name or tenant_id, email), attempt)
    with database.transaction() as session:
        fields = {
            "tenant_id": tenant_id,
            "provider": provider.name,
            "external_id": made,
            "created_at": clock.now(),
        }
        insert_new(session, PaymentCustomer.__table__, [fields], "tenant_id", "provider")  # type: ignore[arg-type]
        return session.get_one(PaymentCustomer, (tenant_id, provider.name)).external_id


def _job(
    database: Database, clock: Clock, provider: PaymentProvider, command: PaymentCommand
) -> Job:
    def _save(progress: dict[str, object]) -> None:
        with database.transaction() as session:
            session.execute(
                update(PaymentCommand)
                .where(PaymentCommand.id == command.id)
                .values(progress=dict(progress))
            )

    attempt = Attempt(command.idempotency_key, command.attempts > 1, dict(command.progress), _save)
    return Job(database, clock, provider, command, attempt)


def _finish(job: Job, post: Post) -> None:
    now = job.clock.now()
    with job.database.transaction() as session:
        post(session, now)
        command = session.get_one(PaymentCommand, job.command.id)
        command.done_at, command.last_error = now, None


def _later(job: Job, reason: str, after_s: float | None) -> None:
    now = job.clock.now()
    with job.database.transaction() as session:
        command = session.get_one(PaymentCommand, job.command.id)
        pause = max(after_s or 0.0, pause_s(command.idempotency_key, command.attempts))
        command.next_at = now + timedelta(seconds=pause)
        command.last_error = reason[:500]
    log.warning("command %s will be retried: %s", job.command.idempotency_key, reason)


def _refuse(job: Job, reason: str) -> None:
    with job.database.transaction() as session:
        command = session.get_one(PaymentCommand, job.command.id)
        command.failed, command.last_error = True, reason[:500]
    log.error("command %s was rejected: %s", job.command.idempotency_key, reason)


def _customer(job: Job) -> str:
    assert job.command.tenant_id is not None
    return customer_of(job.database, job.clock, job.provider, job.command.tenant_id)


def _nothing(_session: Session, _at: datetime) -> None:
    """Nothing to post."""


def _invoice(job: Job) -> Post:
    with job.database.read() as session:
        bill = bill_of(session, session.get_one(Invoice, job.command.subject_id))
    state = job.provider.send_invoice(_customer(job), bill, job.attempt)
    return lambda session, at: _post_invoice(session, job, state, at)


def _collect(job: Job) -> Post:
    with job.database.read() as session:
        invoice = session.get_one(Invoice, job.command.subject_id)
        external_id, open_minor = invoice.external_id, open_amounts.open_minor(invoice)
        if invoice.status != FINAL or open_minor <= 0:
            return _nothing
        waiting_command = session.scalar(
            select(PaymentCommand.id).where(
                PaymentCommand.subject_id == invoice.id,
                PaymentCommand.kind.in_((commands.INVOICE, commands.LOWER, commands.CLOSE)),
                PaymentCommand.done_at.is_(None),
            )
        )
    if external_id is None or waiting_command is not None:
        raise TryLater("The provider's copy of the invoice is not up to date yet.")
    state = job.provider.collect_invoice(external_id, job.attempt)
    return lambda session, at: _post_invoice(session, job, state, at)


def _lower(job: Job) -> Post:
    state = job.provider.lower_invoice(
        _external_id(job),
        int(job.command.payload["amount_minor"]),
        str(job.command.payload["reason"]),
        job.attempt,
    )
    return lambda session, at: _post_invoice(session, job, state, at)


def _close(job: Job) -> Post:
    state = job.provider.close_invoice(
        _external_id(job), str(job.command.payload["how"]), job.attempt
    )
    return lambda session, at: _post_invoice(session, job, state, at)


def _external_id(job: Job) -> str:
    with job.database.read() as session:
        external_id = session.get_one(Invoice, job.command.subject_id).external_id
    if external_id is None:
        raise TryLater("The invoice is not at the provider yet.")
    return external_id


def _post_invoice(session: Session, job: Job, state: object, at: datetime) -> None:
    posting.invoice(session, job.provider.name, state, at)  # type: ignore[arg-type]


def _charge(job: Job) -> Post:
    with job.database.read() as session:
        payment = session.get_one(Payment, job.command.subject_id)
        if payment.status != settlement.PENDING:
            return _nothing
        wanted = Charge(
            payment.id,
            payment.tenant_id,
            payment.currency,
            payment.amount_minor,
            "Top-up of the prepaid balance",
            methods_of(session.get(BillingAccount, payment.tenant_id)),
        )
    state = job.provider.charge(_customer(job), wanted, job.attempt)
    return lambda session, at: posting.payment(session, job.provider.name, state, at)


def _refund(job: Job) -> Post:
    with job.database.read() as session:
        made = session.get_one(Refund, job.command.subject_id)
        paid = session.get_one(Payment, made.payment_id)
        if made.status != Status.PENDING:
            return _nothing
        name, amount, reference = paid.external_id, made.amount_minor, made.reference
    if name is None:
        raise Refused("The payment has no id at the provider.")
    try:
        state = job.provider.refund(name, amount, reference, job.attempt)
    except Refused as error:
        return _reverse_refund(made.id, str(error))
    return lambda session, at: posting.refund(session, job.provider.name, state, at)


def _reverse_refund(refund_id: str, reason: str) -> Post:
    """Reverse a refund that the provider rejected."""

    def _post(session: Session, at: datetime) -> None:
        settlement.refund_failed(session, session.get_one(Refund, refund_id), reason, at)

    return _post


def _usage(job: Job) -> Post:
    what = job.command.payload
    job.provider.report_usage(
        UsageReport(
            job.command.idempotency_key.removeprefix("usage:"),
            str(what["meter"]),
            _customer(job),
            int(what["value"]),
            datetime.fromisoformat(str(what["at"])),
        )
    )
    return _nothing


HANDLERS: dict[str, Callable[[Job], Post]] = {
    commands.INVOICE: _invoice,
    commands.COLLECT: _collect,
    commands.LOWER: _lower,
    commands.CLOSE: _close,
    commands.CHARGE: _charge,
    commands.REFUND: _refund,
    commands.USAGE: _usage,
}
