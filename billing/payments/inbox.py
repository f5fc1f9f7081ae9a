"""The inbox stores each verified event once and applies it later, by fetching the current state of its
object from the provider. Events may therefore arrive twice, late or out of order, and one fetch
handles all waiting events of the same object. Events that cannot be applied are parked with the reason.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import update
from sqlalchemy.orm import Session

from billing.payments import posting
from billing.payments.base import PaymentProvider, ProviderEvent, Refused, TryLater
from billing.payments.leases import MAX_UNANSWERED, NEXT_EVENT, pause_s, take
from billing.payments.tables import PaymentWebhook
from core.clock import Clock
from core.database import Database, insert_new
from core.errors import NotFound, TollhouseError

log = logging.getLogger("tollhouse.payments")
MAX_ATTEMPTS = 10  # before an event is parked: about an hour
Post = Callable[[Session, datetime], None]


@dataclass(frozen=True, slots=True)
class Applied:
    done: int = 0
    later: int = 0
    parked: int = 0


def receive(session: Session, provider: str, event: ProviderEvent, at: datetime) -> bool:
    """Store an event; False if it was already stored."""
    unknown = event.kind == "unknown"
    fields = {
        "provider": provider,
        "external_id": event.id,
        "type": event.type[:80],
        "kind": event.kind,
        "subject_id": event.subject_id,
        "payload": event.payload,
        "occurred_at": event.occurred_at,
        "received_at": at,
        "next_at": at,
        "attempts": 0,
        "done_at": at if event.kind == "nothing" else None,
        "parked": f"The event type {event.type!r} is unknown." if unknown else None,
    }
    new = insert_new(session, PaymentWebhook.__table__, [fields], "external_id", "provider")  # type: ignore[arg-type]
    if new and unknown:
        log.warning("event %s is parked: its type %s is unknown", event.id, event.type)
    return bool(new)


def apply(database: Database, clock: Clock, provider: PaymentProvider, limit: int = 500) -> Applied:
    done = later = parked = unanswered = 0
    for _ in range(limit):
        if unanswered == MAX_UNANSWERED:
            break
        event = take(database, clock, NEXT_EVENT, provider.name)
        if event is None:
            break
        fetched_at = clock.now()
        try:
            post = _fetch_state(provider, event)
            unanswered = 0
            with database.transaction() as session:
                now = clock.now()
                post(session, now)
                done += _mark_done(session, event, fetched_at, now)
        except posting.ForeignObject as error:
            with database.transaction() as session:
                _mark_done(session, event, fetched_at, clock.now(), f"not ours: {error}")
            done += 1
        except TryLater as error:
            _later(database, clock, event, str(error))
            later += 1
            unanswered += 1
        except (posting.UnknownObject, TollhouseError) as error:
            if event.attempts < MAX_ATTEMPTS:
                _later(database, clock, event, str(error))
                later += 1
            else:
                _park(database, event, str(error))
                parked += 1
        except Refused as error:
            _park(database, event, str(error))
            parked += 1
    return Applied(done, later, parked)


def release(session: Session, provider: str, name: str, at: datetime) -> PaymentWebhook:
    """Retry a parked event."""
    found = _parked(session, provider, name)
    found.parked, found.attempts, found.next_at = None, 0, at
    return found


def dismiss(session: Session, provider: str, name: str, who: str, at: datetime) -> PaymentWebhook:
    """Mark a parked event as handled, keeping its reason."""
    found = _parked(session, provider, name)
    found.done_at, found.last_error = at, f"dismissed by {who}: {found.parked}"
    found.parked = None
    return found


def _parked(session: Session, provider: str, name: str) -> PaymentWebhook:
    found = session.get(PaymentWebhook, (provider, name))
    if found is None or found.parked is None:
        raise NotFound(
            f"No event {name!r} is parked.",
            next_step="List parked events with: tollhouse payment events",
        )
    return found


def _fetch_state(provider: PaymentProvider, event: PaymentWebhook) -> Post:
    """Fetch the current state from the provider; returns the function that posts it."""
    name, subject = provider.name, event.subject_id
    if event.kind == "invoice":
        invoice = provider.invoice(subject)
        return lambda session, at: _ignore(posting.invoice(session, name, invoice, at))
    if event.kind == "payment":
        payment = provider.payment(subject)
        return lambda session, at: posting.payment(session, name, payment, at)
    if event.kind == "refund":
        refund = provider.refund_state(subject)
        return lambda session, at: posting.refund(session, name, refund, at)
    if event.kind == "dispute":
        dispute = provider.dispute(subject)
        return lambda session, at: posting.dispute(session, name, dispute, at)
    if event.kind in ("customer", "method"):
        if not subject:
            raise posting.ForeignObject("payment method without a customer")
        methods = provider.methods(subject, newest=event.kind == "method")
        return lambda session, at: posting.customer(session, name, subject, methods, at)
    raise Refused(f"Events of kind {event.kind!r} are not supported.")


def _ignore(_booked: object) -> None:
    """Discard the result of posting."""


def _mark_done(
    session: Session, event: PaymentWebhook, fetched_at: datetime, now: datetime, note: str = ""
) -> int:
    """Mark the event, and all of the same object received before the fetch, as done."""
    same = (
        update(PaymentWebhook)
        .where(
            PaymentWebhook.provider == event.provider,
            PaymentWebhook.kind == event.kind,
            PaymentWebhook.subject_id == event.subject_id,
            PaymentWebhook.received_at <= fetched_at,
            PaymentWebhook.done_at.is_(None),
            PaymentWebhook.parked.is_(None),
        )
        .values(done_at=now, last_error=note or None)
    )
    return int(session.execute(same).rowcount)  # type: ignore[attr-defined]


def _later(database: Database, clock: Clock, event: PaymentWebhook, reason: str) -> None:
    with database.transaction() as session:
        found = session.get_one(PaymentWebhook, (event.provider, event.external_id))
        pause = pause_s(found.external_id, found.attempts)
        found.next_at = clock.now() + timedelta(seconds=pause)
        found.last_error = reason[:500]


def _park(database: Database, event: PaymentWebhook, reason: str) -> None:
    with database.transaction() as session:
        found = session.get_one(PaymentWebhook, (event.provider, event.external_id))
        found.parked, found.last_error = reason[:500], reason[:500]
    log.error("event %s (%s) is parked: %s", event.external_id, event.type, reason)
