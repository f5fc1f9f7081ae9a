"""Background responses: their status, events and lease, so that any process can show and end them.

The process that generates a response renews its lease. One whose lease has run out has failed: its
gateway was stopped or killed. Only an active response changes; a finished one never does.
"""

import zlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.errors import BadRequest
from core.responses import records
from core.responses.models import ResponseEventRecord, ResponseRecord
from core.responses.records import Exchanged
from core.sealing import Sealer
from core.tenants.keys import Principal
from core.tenants.scope import TenantScope

LEASE = timedelta(seconds=30)
QUEUED, IN_PROGRESS = "queued", "in_progress"
_LOST = "The gateway that generated this response was stopped. Only what it delivered is charged."


def begin(
    session: Session, sealer: Sealer, principal: Principal, given: Exchanged, now: datetime
) -> None:
    records.save(session, sealer, principal, given, now)
    row = session.get_one(ResponseRecord, given.response["id"])
    row.status, row.lease_until = QUEUED, now + LEASE


def active(session: Session, ids: Sequence[str]) -> dict[str, ResponseRecord]:
    """Those of the responses that still run, locked; the others were cancelled, deleted or lost."""
    rows = session.scalars(
        select(ResponseRecord)
        .where(ResponseRecord.id.in_(ids), ResponseRecord.status.is_not(None))
        .order_by(ResponseRecord.id)
        .with_for_update()
    )
    return {row.id: row for row in rows}


def append(session: Session, sealer: Sealer, row: ResponseRecord, events: Sequence[bytes]) -> None:
    """Stores server-sent events that follow the stored ones."""
    if not events:
        return
    first = _count(session, row)
    content = zlib.compress(orjson.dumps([each.decode() for each in events]))
    sealed = sealer.seal(row.tenant_id, f"{row.id}/{first}", content)
    session.add(
        ResponseEventRecord(response_id=row.id, first=first, count=len(events), sealed=sealed)
    )
    row.status = IN_PROGRESS
    row.stored_bytes += len(sealed)
    session.flush()


def finish(session: Session, sealer: Sealer, row: ResponseRecord, response: dict[str, Any]) -> None:
    """The response as it stays; the lease ends."""
    records.replace(session, sealer, row, response)
    row.status = row.lease_until = None


def fail(session: Session, sealer: Sealer, row: ResponseRecord, code: str, message: str) -> None:
    """Ends it with what was generated so far, and with the event that says so."""
    response = _with_output(session, sealer, row)
    response |= {"status": "failed", "error": {"code": code, "message": message}}
    event = {
        "type": "response.failed",
        "sequence_number": _count(session, row),
        "response": response,
    }
    data = b"event: response.failed\ndata: " + orjson.dumps(event) + b"\n\n"
    append(session, sealer, row, [data])
    finish(session, sealer, row, response)


def cancel(
    session: Session, sealer: Sealer, scope: TenantScope, response_id: str, now: datetime
) -> dict[str, Any]:
    """The response; one that has finished stays as it is."""
    row = records.row_of(session, scope, response_id, now, to_change=True)
    response = records.get(session, sealer, scope, response_id, now).response
    if not response.get("background"):
        raise BadRequest(
            f"{response_id[:80]} is not a background response.",
            next_step="Close its connection to cancel a response that is not in the background.",
            code="invalid_request",
        )
    if row.status is not None:
        response = _with_output(session, sealer, row) | {"status": "cancelled"}
        finish(session, sealer, row, response)
    return response


def fail_lost(session: Session, sealer: Sealer, now: datetime) -> int:
    """Fails the responses whose lease has run out. How many."""
    lost = select(ResponseRecord).where(
        ResponseRecord.status.is_not(None), ResponseRecord.lease_until <= now
    )
    rows = session.scalars(lost.limit(100).with_for_update(skip_locked=True)).all()
    for row in rows:
        fail(session, sealer, row, "server_error", _LOST)
    return len(rows)


def events_from(
    session: Session,
    sealer: Sealer,
    scope: TenantScope,
    response_id: str,
    first: int,
    now: datetime,
) -> tuple[list[bytes], bool]:
    """The stored events from number `first` on, and whether they are all."""
    row = records.row_of(session, scope, response_id, now)
    return _events(session, sealer, row, first), row.status is None


def _events(session: Session, sealer: Sealer, row: ResponseRecord, first: int) -> list[bytes]:
    batches = session.scalars(
        select(ResponseEventRecord)
        .where(
            ResponseEventRecord.response_id == row.id,
            ResponseEventRecord.first + ResponseEventRecord.count > first,
        )
        .order_by(ResponseEventRecord.first)
    )
    found: list[bytes] = []
    for batch in batches:
        content = sealer.open(row.tenant_id, f"{row.id}/{batch.first}", batch.sealed)
        events = [each.encode() for each in orjson.loads(zlib.decompress(content))]
        found += events[max(0, first - batch.first) :]
    return found


def _count(session: Session, row: ResponseRecord) -> int:
    """Of the stored events."""
    counted = select(func.coalesce(func.sum(ResponseEventRecord.count), 0))
    return int(session.scalar(counted.where(ResponseEventRecord.response_id == row.id)) or 0)


def _with_output(session: Session, sealer: Sealer, row: ResponseRecord) -> dict[str, Any]:
    response: dict[str, Any] = records.opened(sealer, row).response
    return response | {"output": _output_of(_events(session, sealer, row, 0))}


def _output_of(events: Sequence[bytes]) -> list[dict[str, Any]]:
    """The items that the events have delivered; the text of the open one, which is incomplete."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        data = orjson.loads(event.partition(b"\ndata: ")[2])
        kind, index = data["type"], data.get("output_index")
        if kind == "response.output_item.added":
            items[index] = {**data["item"], "status": "incomplete"}
        elif kind == "response.output_item.done":
            items[index] = data["item"]
        elif kind == "response.content_part.added":
            items[index]["content"] = [data["part"]]
        elif kind == "response.output_text.delta":
            items[index]["content"][0]["text"] += data["delta"]
    return [items[index] for index in sorted(items)]
