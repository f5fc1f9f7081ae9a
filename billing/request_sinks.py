"""Where tenants get a record of each of their requests: endpoints of webhooks, off by default.

In memory, refreshed when a tenant changes. A record never waits for a database or a receiver.
"""

from datetime import datetime

from msgspec import Struct
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing import webhooks
from billing.models import WebhookEndpoint
from core.clock import Clock
from core.database import Database
from core.tenants.scope import TenantScope

# Events of an endpoint that gets records: without or with the texts of prompt and answer.
COMPLETED, CONTENT = "request.completed", "request.content"


class Sink(Struct, frozen=True):
    id: str
    url: str
    secret: str
    content: bool  # with texts, as moderation left them
    since: datetime


class SinkView:
    """The sinks in force, by tenant; a tenant has at most one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.sinks: dict[str, Sink] = {}

    def refresh(self) -> None:
        """Blocking; run in a thread."""
        found = {}
        with self._database.read() as session:
            for row in session.scalars(
                select(WebhookEndpoint)
                .where(WebhookEndpoint.ended_at.is_(None))
                .order_by(WebhookEndpoint.created_at)
            ):
                if _is_sink(row):
                    found[row.tenant_id] = _sink(row)
        self.sinks = found


def sink_of(session: Session, scope: TenantScope) -> Sink | None:
    rows = [each for each in webhooks.of_tenant(session, scope) if _is_sink(each)]
    return _sink(rows[-1]) if rows else None


def set_sink(
    session: Session, scope: TenantScope, clock: Clock, url: str, *, content: bool
) -> Sink:
    """Replaces the tenant's sink. Its secret is new: show it once."""
    remove_sink(session, scope, clock)
    kind = CONTENT if content else COMPLETED
    return _sink(webhooks.add(session, scope, clock, url, [kind], known=(COMPLETED, CONTENT)))


def remove_sink(session: Session, scope: TenantScope, clock: Clock) -> None:
    for each in webhooks.of_tenant(session, scope):
        if _is_sink(each):
            webhooks.remove(session, scope, clock, each.id)
    session.flush()


def _is_sink(row: WebhookEndpoint) -> bool:
    return COMPLETED in row.events or CONTENT in row.events


def _sink(row: WebhookEndpoint) -> Sink:
    return Sink(row.id, row.url, row.secret, CONTENT in row.events, row.created_at)
