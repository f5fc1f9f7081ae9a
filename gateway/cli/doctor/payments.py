"""Check of the queue between the ledger and Stripe: refused, parked and late items."""

from datetime import timedelta

from sqlalchemy import func, select

from billing.payments.tables import PaymentCommand, PaymentWebhook
from core.clock import Clock
from core.database import Database, Limits
from core.settings import Settings
from gateway.cli.doctor.check import Finding, good, unused, warn
from migrations.run import current

LATE = timedelta(hours=1)


def queue(settings: Settings, clock: Clock) -> Finding:
    """Report refused commands and parked events with their reasons, and commands that are late."""
    if not settings.stripe_api_key:
        return unused("nothing is sent to a payment provider")
    database = Database(settings.effective_database_url, limits=Limits(connect_s=2))
    command, event = PaymentCommand, PaymentWebhook
    try:
        if current(database) is None:
            return unused("the database is empty")
        with database.read() as session:
            refused = session.scalars(
                select(command.last_error).where(command.failed.is_(True)).limit(50)
            ).all()
            parked = session.scalars(
                select(event.parked).where(event.parked.is_not(None)).limit(50)
            ).all()
            late = session.scalar(
                select(func.count())
                .select_from(command)
                .where(
                    command.done_at.is_(None),
                    command.failed.is_(False),
                    command.created_at < clock.now() - LATE,
                )
            )
    finally:
        database.close()
    summary = f"{len(refused)} refused commands, {len(parked)} parked events, {late} late"
    if refused or parked or late:
        reasons = list(dict.fromkeys(str(each) for each in (*refused, *parked)))[:3]
        return warn(
            "; ".join([summary, *reasons]),
            "List them with `tollhouse payment outbox` and `tollhouse payment events`, fix the cause, "
            "then run `tollhouse payment retry`.",
        )
    return good(summary)
