"""Playground: streams answers of one or two models side by side, with tokens and cost."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from billing.pricing.prices import load_price_book
from billing.pricing.pricing import PPM, Component
from core.errors import NotFound, TollhouseError
from core.tenants import keys
from core.tenants.key_scopes import KeyScopes
from core.tenants.models import ApiKey, Project, Tenant
from dashboards.pages.common import deps_of, viewer_of
from dashboards.render import page
from dashboards.viewer import Viewer

KEY_NAME = "playground page"
KEY_AGE = timedelta(hours=1)
_ROUTE = "/v1/chat/completions"
_PRICED = (Component.INPUT, Component.CACHED_INPUT, Component.OUTPUT)


@dataclass(frozen=True, slots=True)
class Choice:
    """A value for `model`, with the price per token in picounits (of the first tier)."""

    name: str
    units: tuple[int, int, int] = (0, 0, 0)  # input, cached input, output
    currency: str = ""


def playground(request: Request) -> Response:
    viewer, deps = viewer_of(request, "usage"), deps_of(request)
    names = deps.models(viewer.scope)
    with deps.database.read() as session:
        models = _choices(session, viewer.scope.tenant_id, names, deps.clock.now())
        projects = _projects(session, viewer)
    makes_keys = bool(projects) and deps.auth.may(viewer, "keys", "write")
    return page(
        request,
        "playground.html",
        models=models,
        projects=projects,
        makes_keys=makes_keys,
        chosen=request.query_params.get("model", ""),
        project=request.query_params.get("project", ""),
    )


def _projects(session: Session, viewer: Viewer) -> list[tuple[str, str]]:
    """(id, name) of the projects that the viewer may make keys in, oldest first."""
    query = select(Project.id, Project.name).where(
        Project.tenant_id == viewer.scope.tenant_id, Project.archived_at.is_(None)
    )
    if viewer.scope.project_id:
        query = query.where(Project.id == viewer.scope.project_id)
    return [(row[0], row[1]) for row in session.execute(query.order_by(Project.created_at))]


async def make_key(request: Request) -> Response:
    """A short-lived key for the page's own requests, as JSON. It may call one route only."""
    async with request.form(max_fields=4, max_part_size=1_000) as fields:
        project_id = str(fields.get("project_id", ""))
    try:
        secret = await run_in_threadpool(_issue, request, project_id)
    except TollhouseError as error:
        return JSONResponse({"error": {"message": str(error)}}, error.status)
    return JSONResponse({"secret": secret})


def _issue(request: Request, project_id: str) -> str:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    with deps.database.transaction() as session:
        return keys.issue(
            session,
            viewer.scope,
            deps.clock,
            project_id=project_id,
            name=KEY_NAME,
            scopes=KeyScopes(routes=frozenset({_ROUTE})),
            expires_at=deps.clock.now() + KEY_AGE,
        ).secret


def of_ended_page(key: ApiKey, now: datetime) -> bool:
    """Whether the key was of a playground page and has expired: each visit makes one, and a list of
    keys would be full of them."""
    return (
        key.name == KEY_NAME
        and key.expires_at is not None
        and key.expires_at <= now
        and key.expires_at - key.created_at <= KEY_AGE + timedelta(minutes=1)
    )


def _choices(session: Session, tenant_id: str, names: Iterable[str], now: datetime) -> list[Choice]:
    book = load_price_book(session)
    currency = session.get_one(Tenant, tenant_id).currency
    found = []
    for name in names:
        base, _, adapter = name.partition(":")
        try:
            version = book.pin(tenant_id, base, adapter or None, now, currency)
        except NotFound:
            found.append(Choice(name))
            continue
        kept = PPM - version.discount_ppm
        rates = [version.rates.get(each) for each in _PRICED]
        units = [rate.tiers[0].unit * kept // PPM if rate else 0 for rate in rates]
        found.append(Choice(name, (units[0], units[1], units[2]), version.currency))
    return found


ROUTES = [
    Route("/playground", playground, methods=["GET"]),
    Route("/playground/key", make_key, methods=["POST"]),
]
