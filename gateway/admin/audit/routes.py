"""/admin/v1/audit: the audit log, newest first, as a page or whole in a file."""

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response, StreamingResponse

from billing.notices import audit_streams
from billing.notices.request_sinks import is_bucket
from billing.notices.tables import WebhookEndpoint
from core.errors import BadRequest
from core.tenants import audit, audit_chain
from core.tenants.audit import AuditFilter
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.schemas import AuditStreamBody
from gateway.edge.decoding import parse_datetime
from gateway.serving.api.dependencies import AlertTargetsDep

router = APIRouter(prefix="/admin/v1/audit", tags=["audit"])
_COLUMNS = (
    *("id", "at", "actor", "action", "target", "before", "after", "request_id", "changes"),
    "digest",
)
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("audit", "read"))]
StreamReadAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "read"))]
StreamWriteAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))]
_PAGE = 1_000
_TYPES = {"csv": "text/csv; charset=utf-8", "jsonl": "application/jsonl"}


def filter_of(
    action: Annotated[str | None, Query(max_length=80)] = None,
    actor: Annotated[str | None, Query(max_length=120, description="Id of who did it.")] = None,
    target: Annotated[str | None, Query(max_length=120, description="Id of the object.")] = None,
    start: Annotated[
        str | None, Query(alias="from", max_length=40, description="Day or time, UTC, inclusive.")
    ] = None,
    end: Annotated[
        str | None, Query(alias="to", max_length=40, description="Day or time, UTC, exclusive.")
    ] = None,
) -> AuditFilter:
    since, until = _time(start, "from"), _time(end, "to")
    if since is not None and until is not None and since >= until:
        raise BadRequest(
            f"from is {start}, which is not before to, {end}.",
            next_step="Give a start before the end.",
            param="from",
        )
    return AuditFilter(action, actor, target, since, until)


@router.get("", response_model=None)
def list_entries(
    ctx: ReadAccess,
    wanted: Annotated[AuditFilter, Depends(filter_of)],
    *,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of a page; files have all.")] = 100,
    before: Annotated[int | None, Query(ge=0, description="List entries below this id.")] = None,
    format: Literal["json", "csv", "jsonl"] = "json",
) -> dict[str, Any] | Response:
    """`changes` says in words what differs between `before` and `after`."""
    log = _Log(ctx, before, wanted)
    if format == "json":
        rows = log.page(limit + 1)
        return {"object": "list", "data": rows[:limit], "has_more": len(rows) > limit}
    write = _csv if format == "csv" else _jsonl
    name = f'attachment; filename="audit.{format}"'
    headers = {"content-disposition": name}
    return StreamingResponse(write(log.every()), media_type=_TYPES[format], headers=headers)


class _Log:
    def __init__(self, ctx: AdminContext, before: int | None, wanted: AuditFilter) -> None:
        self._ctx, self._before, self._wanted = ctx, before, wanted

    def page(self, limit: int) -> list[dict[str, Any]]:
        with self._ctx.database.read() as session:
            rows = audit.entries(
                session,
                self._ctx.scope,
                limit=limit,
                before_id=self._before,
                wanted=self._wanted,
            )
            return [audit.describe(each) for each in rows]

    def every(self) -> Iterator[dict[str, Any]]:
        while rows := self.page(_PAGE):
            yield from rows
            self._before = rows[-1]["id"]


def _csv(entries: Iterator[dict[str, Any]]) -> Iterator[str]:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for entry in entries:
        writer.writerow([_cell(entry[name]) for name in _COLUMNS])
        yield text.getvalue()
        text.seek(0)
        text.truncate()
    yield text.getvalue()


def _cell(value: Any) -> str:
    """Without a formula: names that a member chose are opened in spreadsheets."""
    text = "" if value is None else value
    text = text if isinstance(text, str | int) else orjson.dumps(text).decode()
    text = str(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _jsonl(entries: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    for entry in entries:
        yield orjson.dumps(entry) + b"\n"


def _time(text: str | None, name: str) -> datetime | None:
    return parse_datetime(text, name) if text else None


@router.get("/verification")
def verify(ctx: ReadAccess, expect: Annotated[str, Query(max_length=64)] = "") -> dict[str, Any]:
    """Every entry against the hash chain. Keep `digest` elsewhere: given later as `expect`, it shows
    that no entry up to it was taken away."""
    with ctx.database.read() as session:
        done = audit_chain.verify(session, ctx.scope.tenant_id, expect)
    return {"object": "audit_verification", "whole": not done.fault_count, **asdict(done)}


@router.get("/stream")
def get_stream(ctx: StreamReadAccess) -> dict[str, Any]:
    """`url` is null while the log is not streamed."""
    with ctx.database.read() as session:
        return stream_shown(audit_streams.stream_of(session, ctx.scope))


@router.put("/stream")
def set_stream(
    body: AuditStreamBody, ctx: StreamWriteAccess, targets: AlertTargetsDep
) -> dict[str, Any]:
    """Send every entry from now on, or from the first one, as signed messages; the secret is in this
    answer only. The operator may name a bucket (`s3://bucket/prefix`) instead."""
    if not (is_bucket(body.url) and ctx.actor.is_operator):
        targets.check([body.url])
    with ctx.database.transaction() as session:
        made = audit_streams.set_stream(session, ctx.scope, ctx.clock, body.url, whole=body.whole)
        return stream_shown(made) | {"secret": None if is_bucket(made.url) else made.secret}


@router.delete("/stream")
def end_stream(ctx: StreamWriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        audit_streams.remove_stream(session, ctx.scope, ctx.clock)
    return stream_shown(None)


def stream_shown(made: WebhookEndpoint | None) -> dict[str, Any]:
    return {
        "object": "audit_stream",
        "url": made.url if made is not None else None,
        "since": made.created_at.isoformat() if made is not None else None,
        "sent_id": made.sent_id if made is not None else None,
    }
