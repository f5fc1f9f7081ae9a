"""A tenant's audit log as a stream: to a webhook, or as objects of a bucket, in the order of its chain.

How far it was sent is kept with the receiver. A receiver may get a batch again, never miss one.
"""

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.notices import outbox, webhooks
from billing.notices.request_sinks import check_bucket, is_bucket
from billing.notices.tables import WebhookEndpoint
from billing.stores import Store
from core.clock import Clock
from core.database import Database
from core.outbound import check_address
from core.tenants import audit
from core.tenants.models import AuditEntry
from core.tenants.scope import TenantScope

EVENT = "audit.entries"
BATCH = 100  # entries of a message or an object
_BATCHES = 50  # of one receiver in one run
log = logging.getLogger("tollhouse.billing")
OpenStore = Callable[[str], Store]


def stream_of(session: Session, scope: TenantScope) -> WebhookEndpoint | None:
    found = [each for each in webhooks.of_tenant(session, scope) if EVENT in each.events]
    return found[-1] if found else None


def set_stream(
    session: Session, scope: TenantScope, clock: Clock, url: str, *, whole: bool = False
) -> WebhookEndpoint:
    """Replaces the tenant's stream; its secret is new: show it once. `whole` begins with the first
    entry, otherwise with the next one. Only the operator may name a bucket: check that first."""
    remove_stream(session, scope, clock)
    last = select(func.max(AuditEntry.id)).where(AuditEntry.tenant_id == scope.tenant_id)
    begins = 0 if whole else session.scalar(last) or 0
    check = check_bucket if is_bucket(url) else check_address
    row = webhooks.add(session, scope, clock, url, [EVENT], known=(EVENT,), check=check)
    row.sent_id = begins
    session.flush()
    return row


def remove_stream(session: Session, scope: TenantScope, clock: Clock) -> bool:
    found = stream_of(session, scope)
    if found is not None:
        webhooks.remove(session, scope, clock, found.id)
    return found is not None


@dataclass(frozen=True, slots=True)
class _Batch:
    endpoint: WebhookEndpoint
    entries: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Of the object: its entries, so that a batch that is written again is the same object."""
        first, last = self.entries[0], self.entries[-1]
        day = str(first["at"])[:10].replace("-", "/")
        return f"{self.endpoint.tenant_id}/{day}/{first['id']:012}-{last['id']:012}.jsonl"


def send(database: Database, clock: Clock, open_store: OpenStore) -> int:
    """Queue or write what was not sent yet; returns how many entries."""
    with database.read() as session:
        open_ = WebhookEndpoint.ended_at.is_(None), WebhookEndpoint.sent_id.is_not(None)
        ids = session.scalars(select(WebhookEndpoint.id).where(*open_)).all()
    sent, problems = 0, []
    for endpoint_id in ids:
        try:
            sent += _send_one(database, clock, endpoint_id, open_store)
        except Exception as error:  # of its store: the others' streams go on
            log.exception("the audit log of %s is not sent", endpoint_id)
            problems.append(error)
    if problems:
        raise problems[0]
    return sent


def _send_one(database: Database, clock: Clock, endpoint_id: str, open_store: OpenStore) -> int:
    sent = 0
    for _ in range(_BATCHES):
        with database.read() as session:
            batch = _next(session, endpoint_id)
        if batch is None:
            break
        bucket = is_bucket(batch.endpoint.url)
        if bucket:
            _write(open_store(batch.endpoint.url), batch)
        with database.transaction() as session:
            row = session.get_one(WebhookEndpoint, endpoint_id, with_for_update=True)
            if row.ended_at is not None or row.sent_id != batch.endpoint.sent_id:
                break  # removed, or sent by another worker
            row.sent_id = batch.entries[-1]["id"]
            if not bucket:
                outbox.put(
                    session,
                    tenant_id=row.tenant_id,
                    subject="Audit log",
                    payload={"event": EVENT, "entries": batch.entries},
                    dedupe=f"{EVENT}:{row.sent_id}",
                    endpoints=[(row.id, row.url)],
                    now=clock.now(),
                )
        sent += len(batch.entries)
    return sent


def _next(session: Session, endpoint_id: str) -> _Batch | None:
    row = session.get_one(WebhookEndpoint, endpoint_id)
    query = select(AuditEntry).where(
        AuditEntry.tenant_id == row.tenant_id, AuditEntry.id > (row.sent_id or 0)
    )
    found = session.scalars(query.order_by(AuditEntry.id).limit(BATCH)).all()
    return _Batch(row, [audit.describe(each) for each in found]) if found else None


def _write(store: Store, batch: _Batch) -> None:
    text = b"".join(orjson.dumps(each) + b"\n" for each in batch.entries)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(text)
        file.flush()
        store.put(batch.name, Path(file.name), "application/jsonl", sha256(text).hexdigest())
