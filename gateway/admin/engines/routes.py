"""/admin/v1/engines: list engines, drain or resume one, and read the list of upstreams again."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core import engine_drains
from core.errors import NotFound
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.schemas import EngineName, UpstreamsDigest
from gateway.engines.routing.engine_view import EngineView
from gateway.serving.api.dependencies import EnginesDep, UpstreamReloadDep

router = APIRouter(prefix="/admin/v1/engines", tags=["operation"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "write"))]


@router.get("")
async def list_engines(_ctx: ReadAccess, engines: EnginesDep) -> dict[str, Any]:
    return {"object": "list", "data": engines.describe()}


@router.post("/drain")
async def drain(body: EngineName, ctx: WriteAccess, engines: EnginesDep) -> dict[str, Any]:
    """Send no new requests to the engine; running ones finish. Drained at 0 `running` and `waiting`."""
    return await _change_drain(ctx, engines, body.engine, engine_drains.drain)


@router.post("/resume")
async def resume(body: EngineName, ctx: WriteAccess, engines: EnginesDep) -> dict[str, Any]:
    return await _change_drain(ctx, engines, body.engine, engine_drains.resume)


@router.get("/upstreams")
async def preview_upstreams(_ctx: ReadAccess, upstreams: UpstreamReloadDep) -> dict[str, Any]:
    """What serving by the file of TOLLHOUSE_UPSTREAMS would change now, after checking it."""
    return (await asyncio.to_thread(upstreams.preview)).described()


@router.post("/upstreams/reload")
async def reload_upstreams(
    body: UpstreamsDigest, ctx: WriteAccess, upstreams: UpstreamReloadDep
) -> dict[str, Any]:
    """Serve by the file from now on, in every gateway process. Requests that run on removed engines
    finish there. Refused if the file is no longer the list with this digest."""
    return (await upstreams.reload(ctx.actor.id, body.digest)).described()


async def _change_drain(
    ctx: OperatorContext, engines: EngineView, name: str, act: Any
) -> dict[str, Any]:
    if name not in {each["engine"] for each in engines.describe()}:
        raise NotFound(
            f"There is no engine {name!r}.", next_step="GET /admin/v1/engines lists them."
        )

    def _write() -> None:
        with ctx.database.transaction() as session:
            act(session, ctx.clock, ctx.actor.id, name)
        engines.refresh()

    await asyncio.to_thread(_write)
    return next(each for each in engines.describe() if each["engine"] == name)
