"""The ASGI application: inference on bare routes, everything else on FastAPI."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route

from gateway.api import (
    batches,
    files,
    finance,
    health,
    lora,
    models,
    moderations,
    sso,
    tokenize,
    webhooks,
)
from gateway.api.admin.routers import ROUTERS as ADMIN_ROUTERS
from gateway.api.errors import add_error_handlers
from gateway.dashboard import dashboard_of
from gateway.exchange import Exchange, Scope
from gateway.once import HEADER, Once
from gateway.openapi import install
from gateway.pipeline import Pipeline
from gateway.surface import Surface
from gateway.surfaces.inventory import inference_surfaces
from gateway.wiring import Services


class Door:
    """One inference route, as an ASGI callable without middleware before the pipeline."""

    def __init__(self, surface: Surface, pipeline: Pipeline, once: Once) -> None:
        self._surface = surface
        self._pipeline = pipeline
        self._once = once

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        await self.serve(Exchange(scope, receive, send))

    def serve(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        if HEADER in exchange.headers:
            return self._once.serve(self._surface, exchange)
        return self._pipeline.serve(self._surface, exchange)


class TollhouseApp(FastAPI):
    """Exposes the inference routes, so that the direct server can bypass ASGI routing."""

    doors: Mapping[bytes, Callable[[Exchange], Coroutine[Any, Any, None]]] = {}


def create_app(services: Services) -> TollhouseApp:
    @asynccontextmanager
    async def _life(_app: FastAPI) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    app = TollhouseApp(
        title="Tollhouse",
        summary="A multi-tenant LLM inference gateway and billing platform.",
        version="0.1.0",
        lifespan=_life,
        redoc_url=None,
        redirect_slashes=False,  # curl does not follow the redirect of a POST
    )
    app.state.services = services
    add_error_handlers(app)
    once = Once(services.pipeline, services.database, services.clock)
    doors = {each.route: Door(each, services.pipeline, once) for each in inference_surfaces()}
    for route, door in doors.items():
        app.router.routes.append(Route(route, door, methods=["POST"]))
    app.doors = {route.encode(): door.serve for route, door in doors.items()}
    app.include_router(health.router)
    app.include_router(models.router)
    app.include_router(finance.router)
    app.include_router(lora.router)
    app.include_router(tokenize.router)
    app.include_router(moderations.router)
    app.include_router(files.router)
    app.include_router(batches.router)
    app.include_router(sso.router)
    app.include_router(webhooks.router)
    for router in ADMIN_ROUTERS:
        app.include_router(router)
    install(app)
    app.mount("/dashboard", dashboard_of(services))
    return app
