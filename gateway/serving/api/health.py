"""/healthz and /health (liveness), /readyz (readiness, with what is missing), /metrics (Prometheus),
and the redirect from / to the dashboard.

With TOLLHOUSE_METRICS_LISTEN, figures and the parts of readiness are served on that address alone
(`app.state.shows_details`). The operator's token sees them everywhere.
"""

import hmac
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from billing.reports import measures
from core.errors import NotFound, Unauthenticated
from core.tenants.operator import is_operator_token
from gateway.edge import own_metrics
from gateway.engines import local_pages as engine_pages
from gateway.serving.api.dependencies import (
    ClockDep,
    DatabaseDep,
    EnginesDep,
    OperatorToken,
    ReadinessDep,
    SettingsDep,
)

router = APIRouter(tags=["operation"])
redirects = APIRouter()


@redirects.get("/dashboard", include_in_schema=False)
@redirects.get("/", include_in_schema=False)
async def redirect_to_dashboard() -> RedirectResponse:
    """Redirect a browser to the dashboard."""
    return RedirectResponse("/dashboard/")


@router.head("/health", include_in_schema=False)
@router.get("/health", include_in_schema=False)  # the path that clients of vLLM ask
@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(
    request: Request, readiness: ReadinessDep, settings: SettingsDep, operator: OperatorToken
) -> JSONResponse:
    parts = await readiness()
    ready = all(part["ready"] for part in parts.values() if part.get("needed", True))
    body: dict[str, Any] = {"status": "ready" if ready else "not ready"}
    may_see = _has_token(request, settings.metrics_token) and request.app.state.shows_details
    if may_see or _is_operator(request, operator):
        body["parts"] = parts
    return JSONResponse(body, 200 if ready else 503)


@router.get("/metrics")
def metrics_page(
    request: Request,
    database: DatabaseDep,
    clock: ClockDep,
    settings: SettingsDep,
    operator: OperatorToken,
    engines: EnginesDep,
) -> Response:
    if not _is_operator(request, operator):
        if not request.app.state.shows_details:
            raise NotFound(
                "/metrics is not served on this address.",
                next_step="Read it on the address that the operator set as TOLLHOUSE_METRICS_LISTEN.",
            )
        if not _has_token(request, settings.metrics_token):
            raise Unauthenticated(
                "/metrics needs a token.",
                next_step="Send TOLLHOUSE_METRICS_TOKEN as `Authorization: Bearer`.",
            )
    measures.refresh(database, clock, settings.events_days)
    own = generate_latest(own_metrics.registry())
    local = engine_pages.page(engines.addresses()).encode()
    return Response(own + local, media_type=CONTENT_TYPE_LATEST)


def _has_token(request: Request, token: str) -> bool:
    """Whether the request bears the token, where one is set."""
    return not token or hmac.compare_digest(_bearer(request).encode(), token.encode())


def _is_operator(request: Request, token: str) -> bool:
    return is_operator_token(token, _bearer(request))


def _bearer(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")
