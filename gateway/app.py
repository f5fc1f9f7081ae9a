"""The ASGI application: inference on bare routes, everything else on FastAPI."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from starlette.routing import Route

from core.sealing import Sealer
from core.tenant_slots import TenantSlots
from gateway.admin import mcp
from gateway.admin.adapters.routes import MAX_UPLOAD_BYTES, vllm_router
from gateway.admin.dashboard import make_dashboard
from gateway.admin.finance import routes as finance
from gateway.admin.finance import usage_kinds
from gateway.admin.members import sso_routes as sso
from gateway.admin.openapi import install_openapi
from gateway.admin.payments.routes import webhook_router
from gateway.admin.routers import ROUTERS as ADMIN_ROUTERS
from gateway.admin.usage import routes as reported_usage
from gateway.answers.surface import Surface
from gateway.edge import release
from gateway.edge.body_limits import BodyLimits
from gateway.edge.client_address import TrustedProxies
from gateway.edge.cors import allow_origins
from gateway.edge.memory import thread_count
from gateway.edge.tenant_slots import ReleaseSlots
from gateway.formats.registry import inference_surfaces
from gateway.formats.responses.request import ROUTE as RESPONSES
from gateway.formats.responses.response import ResponsesSurface
from gateway.request.exchange import Exchange, Scope
from gateway.serving.api import (
    api_page,
    batches,
    completions,
    conversations,
    files,
    health,
    message_batches,
    models,
    moderations,
    responses,
    tokenize,
)
from gateway.serving.api.bodies import known_query
from gateway.serving.api.errors import add_error_handlers
from gateway.serving.api.files import FORM_OVERHEAD
from gateway.serving.background.storing import StoringPipeline
from gateway.serving.idempotency import HEADER, IdempotencyHandler, IdempotencyKeys
from gateway.serving.media.endpoint import MediaEndpoint
from gateway.serving.media.request import ENDPOINTS
from gateway.serving.media.service import MediaService
from gateway.serving.responses import Server
from gateway.serving.services import Services
from gateway.serving.stored_responses.expansion import ResponseStore


class InferenceEndpoint:
    """One inference route, as an ASGI callable without middleware before the pipeline."""

    def __init__(self, surface: Surface, pipeline: Server, idempotency: IdempotencyHandler) -> None:
        self._surface = surface
        self._pipeline = pipeline
        self._idempotency = idempotency

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        await self.serve(Exchange(scope, receive, send))

    def serve(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        if HEADER in exchange.headers:
            return self._idempotency.serve(self._surface, exchange)
        return self._pipeline.serve(self._surface, exchange)


def _storing_endpoint(services: Services, keys: IdempotencyKeys) -> InferenceEndpoint:
    storing = StoringPipeline(services.background)
    return InferenceEndpoint(
        ResponsesSurface(), storing, IdempotencyHandler(storing, keys, services.catalog)
    )


def _idempotency_keys(services: Services) -> IdempotencyKeys:
    return IdempotencyKeys(
        ResponseStore(
            database=services.access_database,
            clock=services.clock,
            sealer=Sealer(services.operator_token),
            quotas=services.storage,
        ),
        services.limiter.request_rate,
        longest_s=services.pipeline.limits.timeout_s,
        max_keys=services.settings.idempotency_keys,
    )


class TollhouseApp(FastAPI):
    """Exposes the inference routes, so that the direct server can bypass ASGI routing."""

    direct_routes: Mapping[bytes, Callable[[Exchange], Coroutine[Any, Any, None]]] = {}
    body_limits: BodyLimits | None = None
    trusted_proxies: TrustedProxies | None = None


def create_app(services: Services) -> TollhouseApp:
    @asynccontextmanager
    async def _lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    app = TollhouseApp(
        title="Tollhouse",
        summary="A multi-tenant LLM inference gateway and billing platform.",
        version=release.version(),
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # curl does not follow the redirect of a POST
    )
    app.state.services = services
    app.state.tenant_slots = TenantSlots(max(1, thread_count() // 2))
    app.add_middleware(ReleaseSlots)
    allow_origins(app, services.settings.cors_origins)
    app.state.shows_details = not services.settings.metrics_listen
    add_error_handlers(app)
    keys = _idempotency_keys(services)
    idempotency = IdempotencyHandler(services.pipeline, keys, services.catalog)
    direct_routes = {
        each.route: InferenceEndpoint(each, services.pipeline, idempotency)
        for each in inference_surfaces()
    }
    direct_routes[RESPONSES] = _storing_endpoint(services, keys)
    for route, handler in direct_routes.items():
        app.router.routes.append(Route(route, handler, methods=["POST"]))
    app.direct_routes = {route.encode(): handler.serve for route, handler in direct_routes.items()}
    media = MediaService(services.pipeline, services.clock, services.settings.max_media_mb << 20)
    for endpoint in ENDPOINTS:
        served = MediaEndpoint(endpoint, media, keys)
        app.router.routes.append(Route(endpoint.route, served, methods=["POST"]))
    app.trusted_proxies = TrustedProxies(services.settings.trusted_proxies)
    app.body_limits = BodyLimits(
        services.pipeline.limits.max_body,
        {
            b"/v1/files": (services.settings.max_file_mb << 20) + FORM_OVERHEAD,
            b"/admin/v1/adapters": MAX_UPLOAD_BYTES,
            **{each.route.encode(): media.max_bytes for each in ENDPOINTS if each.form},
        },
        frozenset(app.direct_routes),
    )
    app.include_router(health.router)
    app.include_router(health.redirects)
    app.include_router(api_page.router)
    checked = [Depends(known_query)]
    app.include_router(models.router, dependencies=checked)
    app.include_router(finance.router, dependencies=checked)
    app.include_router(usage_kinds.router, dependencies=checked)
    app.include_router(reported_usage.own_router, dependencies=checked)
    app.include_router(mcp.router, dependencies=checked)
    app.include_router(vllm_router, dependencies=checked)
    app.include_router(tokenize.router, dependencies=checked)
    app.include_router(responses.router, dependencies=checked)
    app.include_router(conversations.router, dependencies=checked)
    app.include_router(completions.router, dependencies=checked)
    app.include_router(moderations.router, dependencies=checked)
    app.include_router(files.router, dependencies=checked)
    app.include_router(batches.router, dependencies=checked)
    app.include_router(message_batches.router, dependencies=checked)
    app.include_router(sso.router)
    app.include_router(webhook_router)
    for router in ADMIN_ROUTERS:
        app.include_router(router, dependencies=checked)
    install_openapi(app)
    app.mount("/dashboard", make_dashboard(services, lambda: app.openapi()["paths"]))
    return app


def create_metrics_app(services: Services) -> FastAPI:
    """What TOLLHOUSE_METRICS_LISTEN serves, in the process whose services these are."""
    app = FastAPI(title="Tollhouse metrics", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    app.state.shows_details = True
    add_error_handlers(app)
    app.include_router(health.router)
    return app
