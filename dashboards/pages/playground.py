"""Playground: streams one completion of a model or adapter, with tokens and cost."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.prices import load_price_book
from billing.pricing import PPM, Component
from core.errors import NotFound
from core.tenants.models import Tenant
from dashboards.pages.common import deps_of, viewer_of
from dashboards.render import page

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
    return page(request, "playground.html", models=models)


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


ROUTES = [Route("/playground", playground)]
