"""/admin/v1/audit: the audit log, newest first, as a page or whole in a file."""

import csv
import io
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response, StreamingResponse

from core.errors import BadRequest
from core.tenants import audit
from core.tenants.audit import AuditFilter
from gateway.admin.access import AdminContext, RequirePermission
from gateway.edge.decoding import parse_datetime

router = APIRouter(prefix="/admin/v1/audit", tags=["audit"])
_COLUMNS = ("id", "at", "actor", "action", "target", "before", "after", "request_id", "changes")
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
    ctx: Annotated[AdminContext, Depends(RequirePermission("audit", "read"))],
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
