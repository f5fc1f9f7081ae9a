"""/admin/v1/engines: list engines, and drain or resume one."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core import engine_drains
from core.errors import NotFound
from gateway.api.admin.access import OperatorContext, RequireOperator
from gateway.api.admin.schemas import EngineName
from gateway.wiring import Services

router = APIRouter(prefix="/admin/v1/engines", tags=["operation"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "write"))]


@router.get("")
async def list_engines(ctx: ReadAccess) -> dict[str, Any]:
    return {"object": "list", "data": ctx.services.engines.describe()}


@router.post("/drain")
async def drain(body: EngineName, ctx: WriteAccess) -> dict[str, Any]:
    """Send no new requests to the engine; running ones finish. Drained at 0 `running` and `waiting`."""
    return await _change_drain(ctx, body.engine, engine_drains.drain)


@router.post("/resume")
async def resume(body: EngineName, ctx: WriteAccess) -> dict[str, Any]:
    return await _change_drain(ctx, body.engine, engine_drains.resume)


async def _change_drain(ctx: OperatorContext, name: str, act: Any) -> dict[str, Any]:
    services = ctx.services
    if name not in _names(services):
        raise NotFound(
            f"There is no engine {name!r}.", next_step="GET /admin/v1/engines lists them."
        )

    def _write() -> None:
        with services.database.transaction() as session:
            act(session, services.clock, ctx.actor.id, name)
        services.engines.refresh()

    await asyncio.to_thread(_write)
    return next(each for each in services.engines.describe() if each["engine"] == name)


def _names(services: Services) -> set[str]:
    return {replica.name for replica in services.router.replicas()}
