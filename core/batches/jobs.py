"""Batches: created by an API key and run line by line by the gateway process that holds the lease.

validating -> in_progress -> finalizing -> completed, or failed, expired, cancelling -> cancelled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from sqlalchemy import func, insert, or_, select, update
from sqlalchemy.orm import Session

from core.batches import files
from core.batches.models import Batch, BatchLine
from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id
from core.tenants.scope import TenantScope

LEASE_S = 30.0
WINDOW = timedelta(hours=24)
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
MAX_OPEN = 100  # per tenant
MAX_RUNNING = 4  # per tenant, over all processes
# A line that did not run before its batch was cancelled or expired is `unrun`.
WAITING, DONE, FAILED, UNRUN = "waiting", "done", "failed", "unrun"


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one line."""

    number: int
    ok: bool
    result: str  # the line to write to the output or error file
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def create(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    *,
    project_id: str,
    endpoint: str,
    input_file_id: str,
    labels: dict[str, str],
) -> Batch:
    now = clock.now()
    file = files.get(session, scope, input_file_id, now)
    if file.purpose != "batch":
        raise BadRequest(
            f"The file {file.id} has the purpose {file.purpose!r}, not 'batch'.",
            next_step="Upload the file again with the purpose 'batch'.",
            param="input_file_id",
        )
    open_batches = select(Batch.id).where(
        Batch.tenant_id == scope.tenant_id, Batch.status.in_(OPEN)
    )
    if len(session.scalars(open_batches.limit(MAX_OPEN)).all()) >= MAX_OPEN:
        raise BadRequest(
            f"The organisation already has {MAX_OPEN} open batches, the maximum.",
            next_step="Wait for a batch to end, or cancel one.",
            code="too_many_batches",
        )
    batch = Batch(
        id=new_id("batch"),
        tenant_id=scope.tenant_id,
        project_id=project_id,
        key_id=scope.actor,
        endpoint=endpoint,
        input_file_id=file.id,
        completion_window="24h",
        status="validating",
        labels=labels,
        errors=[],
        created_at=now,
        expires_at=now + WINDOW,
    )
    session.add(batch)
    session.flush()
    return batch


def get(session: Session, scope: TenantScope, batch_id: str) -> Batch:
    """NotFound if the batch does not exist or belongs to another project."""
    batch = session.get(Batch, batch_id)
    foreign = batch is None or batch.tenant_id != scope.tenant_id
    if (
        batch is None
        or foreign
        or (scope.project_id is not None and batch.project_id != scope.project_id)
    ):
        raise NotFound(
            f"There is no batch {batch_id[:80]!r}.",
            next_step="GET /v1/batches lists them.",
            param="batch_id",
        )
    return batch


def all_of(
    session: Session,
    scope: TenantScope,
    endpoints: Sequence[str],
    *,
    after: str | None = None,
    limit: int = 20,
) -> list[Batch]:
    """Those of the endpoints, newest first."""
    query = select(Batch).where(
        Batch.tenant_id == scope.tenant_id, Batch.endpoint.in_(list(endpoints))
    )
    if scope.project_id is not None:
        query = query.where(Batch.project_id == scope.project_id)
    if after is not None:
        query = query.where(Batch.id < after)
    return list(session.scalars(query.order_by(Batch.id.desc()).limit(limit)))


def cancel(session: Session, scope: TenantScope, clock: Clock, batch_id: str) -> Batch:
    batch = get(session, scope, batch_id)
    if batch.status in ("validating", "in_progress"):
        batch.status, batch.cancelling_at = "cancelling", clock.now()
        session.flush()
    elif batch.status not in ("cancelling", "cancelled"):
        raise Conflict(
            f"The batch is {batch.status}; it can no longer be cancelled.",
            next_step="GET it to see its result.",
            code="batch_ended",
        )
    return batch


def claim(session: Session, owner: str, now: datetime, held: Sequence[str]) -> Batch | None:
    """Lease an open batch without a live lease to `owner`, skipping the ids in `held`: the oldest of
    the tenant with the fewest leases, at most MAX_RUNNING of one tenant."""
    free = or_(Batch.lease_until.is_(None), Batch.lease_until < now)
    running = (
        select(Batch.tenant_id, func.count().label("leases"))
        .where(Batch.status.in_(OPEN), Batch.lease_until >= now)
        .group_by(Batch.tenant_id)
        .subquery()
    )
    leases = func.coalesce(running.c.leases, 0)
    query = (
        select(Batch.id)
        .outerjoin(running, running.c.tenant_id == Batch.tenant_id)
        .where(Batch.status.in_(OPEN), free, Batch.id.not_in(held), leases < MAX_RUNNING)
    )
    for batch_id in session.scalars(query.order_by(leases, Batch.id).limit(5)):
        claimed = session.execute(
            update(Batch)
            .where(Batch.id == batch_id, free)
            .values(lease_owner=owner, lease_until=now + timedelta(seconds=LEASE_S))
            .returning(Batch.id)
        ).all()
        if claimed:
            return session.get(Batch, batch_id, populate_existing=True)
    return None


def renew(session: Session, batch_id: str, owner: str, now: datetime) -> Batch | None:
    """Extend the lease. Returns the current row, or None if another process holds the lease."""
    renewed = session.execute(
        update(Batch)
        .where(Batch.id == batch_id, Batch.lease_owner == owner)
        .values(lease_until=now + timedelta(seconds=LEASE_S))
        .returning(Batch.id)
    ).all()
    return session.get(Batch, batch_id, populate_existing=True) if renewed else None


def release(session: Session, batch_id: str, owner: str) -> None:
    session.execute(
        update(Batch)
        .where(Batch.id == batch_id, Batch.lease_owner == owner)
        .values(lease_owner=None, lease_until=None)
    )


def start(
    session: Session,
    batch: Batch,
    lines: Iterable[tuple[str, str]],
    model: str | None,
    now: datetime,
) -> None:
    """Store the validated lines, pairs of (custom id, body), and move the batch to in_progress."""
    rows = (
        {"batch_id": batch.id, "number": number, "custom_id": name, "body": body, "state": WAITING}
        for number, (name, body) in enumerate(lines)
    )
    batch.total, batch.model = 0, model
    while chunk := list(islice(rows, 1000)):
        session.execute(insert(BatchLine), chunk)
        batch.total += len(chunk)
    batch.in_progress_at = now
    if batch.status == "validating":
        batch.status = "in_progress"
    session.flush()


def waiting_lines(
    session: Session, batch_id: str, limit: int, skip: Sequence[int] = ()
) -> list[BatchLine]:
    query = select(BatchLine).where(BatchLine.batch_id == batch_id, BatchLine.state == WAITING)
    if skip:
        query = query.where(BatchLine.number.not_in(skip))
    return list(session.scalars(query.order_by(BatchLine.number).limit(limit)))


def record_results(session: Session, batch: Batch, result_chunks: Iterable[LineResult]) -> None:
    """Record results. A line counts once even if two processes ran it."""
    for each in result_chunks:
        new = session.execute(
            update(BatchLine)
            .where(
                BatchLine.batch_id == batch.id,
                BatchLine.number == each.number,
                BatchLine.state == WAITING,
            )
            .values(state=DONE if each.ok else FAILED, result=each.result)
            .returning(BatchLine.number)
        ).all()
        if not new:
            continue
        batch.completed += each.ok
        batch.failed += not each.ok
        batch.input_tokens += each.input_tokens
        batch.cached_tokens += each.cached_tokens
        batch.output_tokens += each.output_tokens
    session.flush()


def record_unrun(session: Session, batch: Batch, results: Iterable[LineResult]) -> None:
    """The lines of waiting requests that will not run. They are counted by what is left of the total,
    since they neither succeeded nor failed."""
    for each in results:
        session.execute(
            update(BatchLine)
            .where(
                BatchLine.batch_id == batch.id,
                BatchLine.number == each.number,
                BatchLine.state == WAITING,
            )
            .values(state=UNRUN, result=each.result)
        )
    session.flush()


def unrun(batch: Batch) -> int:
    """Requests of an ended batch that did not run."""
    left = batch.total - batch.completed - batch.failed
    return left if batch.status in ("cancelled", "expired") else 0


def record_result(session: Session, batch_id: str, answer: LineResult) -> None:
    """Record a result read from the spool: the process that ran the line may have died since."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if batch is not None:
        record_results(session, batch, [answer])


def result_chunks(session: Session, batch_id: str, states: Sequence[str]) -> Iterable[bytes]:
    """Chunks of the output (`done`) or error (`failed`, `unrun`) file, in input order."""
    last = -1
    while True:
        rows = session.execute(
            select(BatchLine.number, BatchLine.result)
            .where(BatchLine.batch_id == batch_id, BatchLine.state.in_(states))
            .where(BatchLine.number > last)
            .order_by(BatchLine.number)
            .limit(500)
        ).all()
        if not rows:
            return
        last = rows[-1][0]
        yield b"".join((result or "").encode() + b"\n" for _number, result in rows)
