"""/healthz (liveness), /readyz (readiness, with what is missing), /metrics (Prometheus), and the
redirect from / to the dashboard."""

import os
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from billing import measures
from gateway.api.access import ServicesDep

router = APIRouter(tags=["operation"])


@router.get("/dashboard", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def redirect_to_dashboard() -> RedirectResponse:
    """Redirect a browser to the dashboard."""
    return RedirectResponse("/dashboard/")


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(services: ServicesDep) -> JSONResponse:
    parts = await services.readiness()
    ready = all(part["ready"] for part in parts.values() if part.get("needed", True))
    body: dict[str, Any] = {"status": "ready" if ready else "not ready", "parts": parts}
    return JSONResponse(body, 200 if ready else 503)


@router.get("/metrics")
def metrics_page(services: ServicesDep) -> Response:
    measures.refresh(services.database, services.clock)
    registry = REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
