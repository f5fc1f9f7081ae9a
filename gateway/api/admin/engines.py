"""/admin/v1/engines: list engines, and drain or resume one."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core import drains
from core.errors import NotFound
from gateway.api.admin.access import OperatorOnly, OperatorVisit
from gateway.schemas.admin import EngineName
from gateway.wiring import Services

router = APIRouter(prefix="/admin/v1/engines", tags=["operation"])
Reads = Annotated[OperatorVisit, Depends(OperatorOnly("operations", "read"))]
Writes = Annotated[OperatorVisit, Depends(OperatorOnly("operations", "write"))]


@router.get("")
async def list_engines(visit: Reads) -> dict[str, Any]:
    return {"object": "list", "data": visit.services.engines.listed()}


@router.post("/drain")
async def drain(body: EngineName, visit: Writes) -> dict[str, Any]:
    """Send no new requests to the engine; running ones finish. Drained at 0 `running` and `waiting`."""
    return await _order(visit, body.engine, drains.drain)


@router.post("/resume")
async def resume(body: EngineName, visit: Writes) -> dict[str, Any]:
    return await _order(visit, body.engine, drains.resume)


async def _order(visit: OperatorVisit, name: str, act: Any) -> dict[str, Any]:
    services = visit.services
    if name not in _names(services):
        raise NotFound(
            f"There is no engine {name!r}.", next_step="GET /admin/v1/engines lists them."
        )

    def _write() -> None:
        with services.database.transaction() as session:
            act(session, services.clock, visit.actor.id, name)
        services.engines.refresh()

    await asyncio.to_thread(_write)
    return next(each for each in services.engines.listed() if each["engine"] == name)


def _names(services: Services) -> set[str]:
    return {place.name for place in services.router.places()}
