"""Tenants' webhook endpoints and the events sent to them. Each event queues one message per
subscribed endpoint, in the transaction that causes it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.notices import outbox, signing
from billing.notices.message_shapes import Shape
from billing.notices.tables import OutboxMessage, WebhookEndpoint
from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id
from core.outbound import check_address
from core.tenants import audit
from core.tenants.scope import TenantScope

EVENTS = {
    "budget.threshold": "A budget reached one of its thresholds.",
    "invoice.final": "An invoice is final and due.",
    "invoice.reminder": "An invoice is past due.",
    "invoice.suspended": "Service is suspended because an invoice is unpaid.",
    "invoice.reinstated": "Service is restored.",
    "payment.succeeded": "A payment succeeded.",
    "payment.failed": "A payment failed.",
    "export.done": "A scheduled export was written.",
    "export.parked": "A scheduled export failed repeatedly and needs attention.",
}
TEST = "webhook.test"
MAX_ENDPOINTS = 20


@dataclass(frozen=True, slots=True)
class Notification:
    tenant_id: str
    event: str  # of EVENTS
    subject: str
    dedupe: str  # deduplication key
    payload: Mapping[str, Any]


def add(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    url: str,
    events: Sequence[str] = (),
    *,
    known: Iterable[str] = EVENTS,
    check: Callable[[str], None] = check_address,
    shape: Shape = Shape(),
) -> WebhookEndpoint:
    """Add an endpoint. Show its `secret` once, now. No `events` subscribes to all of EVENTS. `known`
    are the names that may be subscribed to, and `check` refuses a malformed `url`."""
    check(url)
    shape.check()
    for name in events:
        if name not in known:
            raise BadRequest(
                f"There is no event {name[:40]!r}.",
                next_step=f"Use one of {', '.join(EVENTS)}.",
                param="events",
            )
    if len(of_tenant(session, scope)) >= MAX_ENDPOINTS:
        raise Conflict(
            f"The tenant has {MAX_ENDPOINTS} endpoints, the maximum.",
            next_step="Remove one of them first.",
        )
    created = WebhookEndpoint(
        id=new_id("hook"),
        tenant_id=scope.tenant_id,
        url=url,
        secret=signing.new_secret(),
        events=list(events),
        format=shape.format,
        authorization=shape.routing_key,
        created_at=clock.now(),
    )
    session.add(created)
    session.flush()
    audit.record(
        session, scope, clock, "webhook.add", created.id, before=None, after=_shown(created)
    )
    return created


def remove(session: Session, scope: TenantScope, clock: Clock, endpoint_id: str) -> None:
    """End an endpoint; its undelivered messages are marked as failed."""
    found = get(session, scope, endpoint_id)
    found.ended_at = clock.now()
    waiting = session.scalars(
        select(OutboxMessage).where(
            OutboxMessage.endpoint_id == found.id, OutboxMessage.done_at.is_(None)
        )
    )
    for message in waiting:
        message.failed, message.done_at = True, clock.now()
        message.last_error = "the endpoint was removed"
    audit.record(
        session, scope, clock, "webhook.remove", found.id, before=_shown(found), after=None
    )


def get(session: Session, scope: TenantScope, endpoint_id: str) -> WebhookEndpoint:
    found = session.get(WebhookEndpoint, endpoint_id)
    if found is None or found.tenant_id != scope.tenant_id or found.ended_at is not None:
        raise NotFound(
            f"There is no endpoint {endpoint_id[:40]!r}.", next_step="Choose one from the list."
        )
    return found


def of_tenant(session: Session, scope: TenantScope) -> list[WebhookEndpoint]:
    query = select(WebhookEndpoint).where(
        WebhookEndpoint.tenant_id == scope.tenant_id, WebhookEndpoint.ended_at.is_(None)
    )
    return list(session.scalars(query.order_by(WebhookEndpoint.created_at, WebhookEndpoint.id)))


def test(session: Session, scope: TenantScope, clock: Clock, endpoint_id: str) -> None:
    """Send a test message to an endpoint."""
    found = get(session, scope, endpoint_id)
    now = clock.now()
    outbox.put(
        session,
        tenant_id=scope.tenant_id,
        subject="Test message",
        payload={"event": TEST, "tenant_id": scope.tenant_id, "at": now.isoformat()},
        dedupe=new_id("test"),
        endpoints=[(found.id, found.url)],
        now=now,
    )
    audit.record(session, scope, clock, "webhook.test", found.id, before=None, after=None)


def notify(session: Session, notifications: Iterable[Notification], now: datetime) -> int:
    """Queue a message for each subscribed endpoint; returns the number of new ones."""
    wanted = list(notifications)
    tenants = {cause.tenant_id for cause in wanted}
    if not tenants:
        return 0
    endpoints_of: dict[str, list[WebhookEndpoint]] = defaultdict(list)
    for each in session.scalars(
        select(WebhookEndpoint).where(
            WebhookEndpoint.tenant_id.in_(tenants), WebhookEndpoint.ended_at.is_(None)
        )
    ):
        endpoints_of[each.tenant_id].append(each)
    queued = 0
    for cause in wanted:
        ends = [
            (each.id, each.url)
            for each in endpoints_of[cause.tenant_id]
            if not each.events or cause.event in each.events
        ]
        if ends:
            queued += outbox.put(
                session,
                tenant_id=cause.tenant_id,
                subject=cause.subject,
                payload={"event": cause.event, **cause.payload},
                dedupe=f"{cause.event}:{cause.dedupe}",
                endpoints=ends,
                now=now,
            )
    return queued


def send_again(session: Session, scope: TenantScope, clock: Clock, message_id: int) -> None:
    """Requeue a failed message now, under the same message id."""
    found = session.get(OutboxMessage, message_id)
    if found is None or found.tenant_id != scope.tenant_id or not found.failed:
        raise NotFound(
            f"There is no failed message {message_id}.", next_step="Choose one from the list."
        )
    if found.endpoint_id is not None:
        get(session, scope, found.endpoint_id)
    found.failed, found.done_at, found.attempts = False, None, 0
    found.next_at = clock.now()
    audit.record(session, scope, clock, "message.resend", str(message_id), before=None, after=None)


def deliveries(
    session: Session, scope: TenantScope, before_id: int | None = None, limit: int = 100
) -> list[OutboxMessage]:
    """Messages, newest first; `before_id` is the cursor of the next page."""
    query = select(OutboxMessage).where(OutboxMessage.tenant_id == scope.tenant_id)
    if before_id is not None:
        query = query.where(OutboxMessage.id < before_id)
    return list(session.scalars(query.order_by(OutboxMessage.id.desc()).limit(limit)))


def last_states(session: Session, scope: TenantScope) -> dict[str, OutboxMessage]:
    """The latest message of each endpoint, by endpoint id."""
    newest = (
        select(func.max(OutboxMessage.id))
        .where(OutboxMessage.tenant_id == scope.tenant_id, OutboxMessage.endpoint_id.is_not(None))
        .group_by(OutboxMessage.endpoint_id)
    )
    found = session.scalars(select(OutboxMessage).where(OutboxMessage.id.in_(newest)))
    return {str(each.endpoint_id): each for each in found}


def _shown(each: WebhookEndpoint) -> dict[str, Any]:
    return {"url": each.url, "events": each.events or ["all"]}
