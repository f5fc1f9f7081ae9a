"""/admin/v1/request-log: the receiver that gets a record of each request of the organisation."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from billing.notices import request_sinks as sinks
from billing.notices.request_sinks import Sink, SinkOptions
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.schemas import RequestLogBody
from gateway.serving.api.dependencies import AlertTargetsDep

router = APIRouter(prefix="/admin/v1/request-log", tags=["tenants"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))]


@router.get("")
def get_receiver(ctx: ReadAccess) -> dict[str, Any]:
    """`url` is null while requests are not logged."""
    with ctx.database.read() as session:
        return _shown(sinks.sink_of(session, ctx.scope))


@router.put("")
def set_receiver(
    body: RequestLogBody, ctx: WriteAccess, targets: AlertTargetsDep
) -> dict[str, Any]:
    """Log every request from now on. The signing secret is in this answer only. The operator may name
    a bucket (`s3://bucket/prefix`) instead of a webhook."""
    if not (sinks.is_bucket(body.url) and ctx.actor.is_operator):
        targets.check([body.url])
    options = SinkOptions(body.content, body.format, body.sample_percent, body.authorization)
    with ctx.database.transaction() as session:
        sink = sinks.set_sink(session, ctx.scope, ctx.clock, body.url, options)
    return _shown(sink) | {"secret": None if sink.is_bucket else sink.secret}


@router.delete("")
def remove_receiver(ctx: WriteAccess) -> dict[str, Any]:
    """Log no more requests; records that wait are dropped."""
    with ctx.database.transaction() as session:
        sinks.remove_sink(session, ctx.scope, ctx.clock)
    return _shown(None)


def _shown(sink: Sink | None) -> dict[str, Any]:
    return {
        "object": "request_log",
        "url": sink.url if sink is not None else None,
        "content": sink.content if sink is not None else False,
        "format": sink.format if sink is not None else None,
        "sample_percent": sink.sample_percent if sink is not None else None,
        "since": sink.since.isoformat() if sink is not None else None,
    }
