"""Playground: one streamed completion with a model or adapter, with its tokens and cost as they come."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dashboards.pages.common import house_of, viewer_of
from dashboards.render import page


def playground(request: Request) -> Response:
    viewer, house = viewer_of(request, "usage"), house_of(request)
    return page(request, "playground.html", models=house.models(viewer.scope))


ROUTES = [Route("/playground", playground)]
