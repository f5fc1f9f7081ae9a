"""/healthz and /health (liveness), /readyz (readiness, with what is missing), /metrics (Prometheus),
and the redirect from / to the dashboard."""

import hmac
import os
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from billing import measures
from core.errors import Unauthenticated
from gateway.api.dependencies import ClockDep, DatabaseDep, ReadinessDep, SettingsDep

router = APIRouter(tags=["operation"])


@router.get("/dashboard", include_in_schema=False)
@router.get("/", include_in_schema=False)
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
async def readyz(request: Request, readiness: ReadinessDep, settings: SettingsDep) -> JSONResponse:
    parts = await readiness()
    ready = all(part["ready"] for part in parts.values() if part.get("needed", True))
    body: dict[str, Any] = {"status": "ready" if ready else "not ready"}
    if _may_see_details(request, settings.metrics_token):
        body["parts"] = parts
    return JSONResponse(body, 200 if ready else 503)


@router.get("/metrics")
def metrics_page(
    request: Request, database: DatabaseDep, clock: ClockDep, settings: SettingsDep
) -> Response:
    if not _may_see_details(request, settings.metrics_token):
        raise Unauthenticated(
            "/metrics needs a token.",
            next_step="Send TOLLHOUSE_METRICS_TOKEN as `Authorization: Bearer`.",
        )
    measures.refresh(database, clock)
    registry = REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _may_see_details(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return not token or hmac.compare_digest(given.encode(), token.encode())
