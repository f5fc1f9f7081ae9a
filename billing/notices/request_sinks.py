"""Where tenants get a record of each of their requests: a webhook or a bucket, off by default.

In memory, refreshed when a tenant changes. A record never waits for a database or a receiver.
"""

import re
import zlib
from datetime import datetime

from msgspec import Struct
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.notices import webhooks
from billing.notices.tables import WebhookEndpoint
from core.clock import Clock
from core.database import Database
from core.errors import BadRequest
from core.outbound import check_address
from core.tenants.scope import TenantScope

# Events of an endpoint that gets records: without or with the texts of prompt and answer.
COMPLETED, CONTENT = "request.completed", "request.content"


RECORDS, OTLP = "records", "otlp"
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()-]+)*/?")


class SinkOptions(Struct, frozen=True):
    content: bool = False
    format: str = RECORDS
    sample_percent: int = 100
    authorization: str | None = None


class Sink(Struct, frozen=True):
    id: str
    url: str
    secret: str
    content: bool  # with texts, as moderation left them
    since: datetime
    format: str = RECORDS
    sample_percent: int = 100  # share of the requests that is recorded
    authorization: str | None = None  # header that the receiver asks for

    @property
    def is_bucket(self) -> bool:
        return is_bucket(self.url)

    def takes(self, request_id: str) -> bool:
        """Whether the request is in the sample: the same answer whenever it is asked."""
        if self.sample_percent >= 100:
            return True
        return zlib.crc32(request_id.encode()) % 100 < self.sample_percent


def is_bucket(url: str) -> bool:
    return url.startswith("s3://")


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
    session: Session, scope: TenantScope, clock: Clock, url: str, options: SinkOptions
) -> Sink:
    """Replaces the tenant's sink. Its secret is new: show it once. BadRequest for options that are
    not possible. Only the operator may name a bucket, which is written with the gateway's own
    credentials: check that first."""
    _check(options, url)
    remove_sink(session, scope, clock)
    kind = CONTENT if options.content else COMPLETED
    check = check_bucket if is_bucket(url) else check_address
    row = webhooks.add(session, scope, clock, url, [kind], known=(COMPLETED, CONTENT), check=check)
    row.format, row.sample_percent = options.format, options.sample_percent
    row.authorization = options.authorization or None
    session.flush()
    return _sink(row)


def _check(options: SinkOptions, url: str) -> None:
    key = options.authorization or ""
    if is_bucket(url) and (options.format != RECORDS or key):
        raise _wrong("url", "a bucket takes no authorization, and records only, as JSON lines")
    if options.format not in (RECORDS, OTLP):
        raise _wrong("format", f"it is {options.format[:40]!r}; it must be {RECORDS} or {OTLP}")
    if not 1 <= options.sample_percent <= 100:
        raise _wrong("sample_percent", f"it is {options.sample_percent}; it must be 1 to 100")
    if len(key) > 400 or not key.isascii() or not key.isprintable():
        raise _wrong("authorization", "it must be at most 400 printable ASCII characters")


def check_bucket(url: str) -> None:
    if _BUCKET.fullmatch(url) is None:
        raise _wrong("url", f"{url[:80]!r} is not of the form s3://bucket/prefix")


def _wrong(param: str, problem: str) -> BadRequest:
    return BadRequest(f"{param} is wrong: {problem}.", next_step=f"Correct {param}.", param=param)


def remove_sink(session: Session, scope: TenantScope, clock: Clock) -> None:
    for each in webhooks.of_tenant(session, scope):
        if _is_sink(each):
            webhooks.remove(session, scope, clock, each.id)


def _is_sink(row: WebhookEndpoint) -> bool:
    return COMPLETED in row.events or CONTENT in row.events


def _sink(row: WebhookEndpoint) -> Sink:
    return Sink(
        row.id,
        row.url,
        row.secret,
        CONTENT in row.events,
        row.created_at,
        row.format or RECORDS,
        row.sample_percent or 100,
        row.authorization,
    )
