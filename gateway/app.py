"""The ASGI application: inference on bare routes, everything else on FastAPI."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route

from gateway.api import absent, finance, health, lora, models, moderations, sso, tokenize
from gateway.api.admin.routers import ROUTERS as ADMIN_ROUTERS
from gateway.api.errors import add_error_handlers
from gateway.dashboard import dashboard_of
from gateway.exchange import Exchange, Scope
from gateway.openapi import install
from gateway.pipeline import Pipeline
from gateway.surface import Surface
from gateway.surfaces.inventory import inference_surfaces
from gateway.wiring import Services


class Door:
    """One inference route. An ASGI callable, so that nothing stands between socket and pipeline."""

    def __init__(self, surface: Surface, pipeline: Pipeline) -> None:
        self._surface = surface
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        await self._pipeline.serve(self._surface, Exchange(scope, receive, send))


def create_app(services: Services) -> FastAPI:
    @asynccontextmanager
    async def _life(_app: FastAPI) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    app = FastAPI(
        title="Tollhouse",
        summary="A multi-tenant LLM inference gateway and billing platform.",
        version="0.1.0",
        lifespan=_life,
        redoc_url=None,
    )
    app.state.services = services
    add_error_handlers(app)
    for surface in inference_surfaces():
        door = Door(surface, services.pipeline)
        app.router.routes.append(Route(surface.route, door, methods=["POST"]))
    app.include_router(health.router)
    app.include_router(models.router)
    app.include_router(finance.router)
    app.include_router(lora.router)
    app.include_router(tokenize.router)
    app.include_router(moderations.router)
    app.include_router(absent.router)
    app.include_router(sso.router)
    for router in ADMIN_ROUTERS:
        app.include_router(router)
    install(app)
    app.mount("/dashboard", dashboard_of(services))
    return app
