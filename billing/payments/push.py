"""The outbox: commands taken one by one, said to the provider outside of any transaction, and what
came of them booked together with the mark that they are done.

Whoever takes a command has it for a while; if it dies, the next one tries again and looks first.
Pauses double up to an hour and never end for what may yet succeed: money is not given up on. What the
provider refuses is put aside with the reason, for a person.
"""

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing import settlement
from billing.accounts import ensure_account
from billing.invoices import FINAL
from billing.models import Invoice, Payment, PaymentCommand, PaymentCustomer, Refund
from billing.payments import booking, commands
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
from billing.payments.bills import bill_of
from billing.payments.leases import MOST_SILENT, NEXT_COMMAND, pause_s, take
from core.clock import Clock
from core.database import Database, insert_new
from core.errors import TollhouseError

log = logging.getLogger("tollhouse.payments")
Book = Callable[[Session, datetime], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A command in hand."""

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


def push(database: Database, clock: Clock, provider: PaymentProvider, limit: int = 500) -> Pushed:
    """Plan, then tell the provider all that is due."""
    with database.transaction() as session:
        commands.plan(session, provider.name, clock.now())
    first = deliver(database, clock, provider, limit)
    if not first.done:
        return first
    with database.transaction() as session:  # what could be planned only now: collections
        more = commands.plan(session, provider.name, clock.now())
    rest = deliver(database, clock, provider, limit) if more else Pushed()
    return Pushed(first.done + rest.done, first.later + rest.later, first.refused + rest.refused)


def deliver(
    database: Database, clock: Clock, provider: PaymentProvider, limit: int = 500
) -> Pushed:
    done = later = refused = silent = 0
    for _ in range(limit):
        if silent == MOST_SILENT:
            break
        command = take(database, clock, NEXT_COMMAND, provider.name)
        if command is None:
            break
        job = _job(database, clock, provider, command)
        try:
            book = HANDLERS[command.kind](job)
            _finish(job, book)
            done += 1
            silent = 0
        except TryLater as error:
            _later(job, str(error), error.after_s)
            later += 1
            silent += 1
        except (booking.NotYet, booking.NotOurs) as error:
            _later(job, f"{type(error).__name__}: {error}", None)
            later += 1
        except (Refused, TollhouseError) as error:
            _refuse(job, str(error))
            refused += 1
    return Pushed(done, later, refused)


def customer_of(database: Database, clock: Clock, provider: PaymentProvider, tenant_id: str) -> str:
    """The tenant's id at the provider, opened there if it has none."""
    with database.read() as session:
        known = session.get(PaymentCustomer, (tenant_id, provider.name))
        if known is not None:
            return known.external_id
    with database.transaction() as session:
        account = ensure_account(session, tenant_id, clock.now())
        name, email = account.legal_name, account.email
    # A renamed account asks under another key: a key goes with what was asked under it.
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


def _finish(job: Job, book: Book) -> None:
    now = job.clock.now()
    with job.database.transaction() as session:
        book(session, now)
        command = session.get_one(PaymentCommand, job.command.id)
        command.done_at, command.last_error = now, None


def _later(job: Job, why: str, after_s: float | None) -> None:
    now = job.clock.now()
    with job.database.transaction() as session:
        command = session.get_one(PaymentCommand, job.command.id)
        pause = max(after_s or 0.0, pause_s(command.idempotency_key, command.attempts))
        command.next_at = now + timedelta(seconds=pause)
        command.last_error = why[:500]
    log.warning("%s must wait: %s", job.command.idempotency_key, why)


def _refuse(job: Job, why: str) -> None:
    with job.database.transaction() as session:
        command = session.get_one(PaymentCommand, job.command.id)
        command.failed, command.last_error = True, why[:500]
    log.error("%s was refused: %s", job.command.idempotency_key, why)


def _customer(job: Job) -> str:
    assert job.command.tenant_id is not None
    return customer_of(job.database, job.clock, job.provider, job.command.tenant_id)


def _nothing(_session: Session, _at: datetime) -> None:
    """There is nothing to book."""


def _invoice(job: Job) -> Book:
    with job.database.read() as session:
        bill = bill_of(session, session.get_one(Invoice, job.command.subject_id))
    state = job.provider.send_invoice(_customer(job), bill, job.attempt)
    return lambda session, at: _book_invoice(session, job, state, at)


def _collect(job: Job) -> Book:
    with job.database.read() as session:
        invoice = session.get_one(Invoice, job.command.subject_id)
        external_id, open_minor = invoice.external_id, settlement.open_minor(invoice)
        if invoice.status != FINAL or open_minor <= 0:
            return _nothing
        untold = session.scalar(
            select(PaymentCommand.id).where(
                PaymentCommand.subject_id == invoice.id,
                PaymentCommand.kind.in_((commands.INVOICE, commands.LOWER, commands.CLOSE)),
                PaymentCommand.done_at.is_(None),
            )
        )
    if external_id is None or untold is not None:
        raise TryLater("The invoice there is not as it is here yet.")
    state = job.provider.collect_invoice(external_id, job.attempt)
    return lambda session, at: _book_invoice(session, job, state, at)


def _lower(job: Job) -> Book:
    state = job.provider.lower_invoice(
        _there(job),
        int(job.command.payload["amount_minor"]),
        str(job.command.payload["reason"]),
        job.attempt,
    )
    return lambda session, at: _book_invoice(session, job, state, at)


def _close(job: Job) -> Book:
    state = job.provider.close_invoice(_there(job), str(job.command.payload["how"]), job.attempt)
    return lambda session, at: _book_invoice(session, job, state, at)


def _there(job: Job) -> str:
    with job.database.read() as session:
        external_id = session.get_one(Invoice, job.command.subject_id).external_id
    if external_id is None:
        raise TryLater("The invoice is not there yet.")
    return external_id


def _book_invoice(session: Session, job: Job, state: object, at: datetime) -> None:
    booking.invoice(session, job.provider.name, state, at)  # type: ignore[arg-type]


def _charge(job: Job) -> Book:
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
        )
    state = job.provider.charge(_customer(job), wanted, job.attempt)
    return lambda session, at: booking.payment(session, job.provider.name, state, at)


def _refund(job: Job) -> Book:
    with job.database.read() as session:
        made = session.get_one(Refund, job.command.subject_id)
        paid = session.get_one(Payment, made.payment_id)
        if made.status != Status.PENDING:
            return _nothing
        name, amount, reference = paid.external_id, made.amount_minor, made.reference
    if name is None:
        raise Refused("The payment is not known to the provider.")
    try:
        state = job.provider.refund(name, amount, reference, job.attempt)
    except Refused as error:
        return _give_up(made.id, str(error))
    return lambda session, at: booking.refund(session, job.provider.name, state, at)


def _give_up(refund_id: str, why: str) -> Book:
    """The provider refuses the refund: the money never left."""

    def _book(session: Session, at: datetime) -> None:
        settlement.refund_failed(session, session.get_one(Refund, refund_id), why, at)

    return _book


def _usage(job: Job) -> Book:
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


HANDLERS: dict[str, Callable[[Job], Book]] = {
    commands.INVOICE: _invoice,
    commands.COLLECT: _collect,
    commands.LOWER: _lower,
    commands.CLOSE: _close,
    commands.CHARGE: _charge,
    commands.REFUND: _refund,
    commands.USAGE: _usage,
}
