"""Request bodies of the small JSON routes: limited in size, typed, with errors that name the field."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import Request
from fastapi.dependencies.models import Dependant

from core.errors import BadRequest
from gateway.edge.decoding import decode, parse_body
from gateway.request.exchange import ClientDisconnected, Exchange
from gateway.serving.responses import RequestLimits

Body = TypeVar("Body")


async def read_body(
    request: Request, limits: RequestLimits, decoder: "msgspec.json.Decoder[Body]"
) -> Body:
    return await parse_body(partial(decode, decoder), await read_raw(request, limits))


async def read_raw(request: Request, limits: RequestLimits) -> bytes:
    """Raises PayloadTooLarge over the size limit, BadRequest if the body does not arrive in time."""
    exchange = Exchange(dict(request.scope), request.receive, None)
    try:
        return await exchange.body(limits.max_body)
    except ClientDisconnected:
        return b""


Endpoint = TypeVar("Endpoint", bound=Callable[..., object])
# Sent with every call by Anthropic's SDK (beta) and by Azure's clients of OpenAI's API.
_OF_SDKS = frozenset(("beta", "api-version"))


async def known_query(request: Request) -> None:
    """A dependency. `reads_query` names what an endpoint reads by itself."""
    if not request.query_params:
        return
    route = request.scope["route"]
    own: tuple[str, ...] = getattr(route.endpoint, "query_names", ())
    known = _collected(route.dependant)
    for name in request.query_params:
        if name not in known and not name.startswith(own) and name not in _OF_SDKS:
            raise BadRequest(
                f"There is no query parameter {name[:80]!r}.",
                next_step=f"Use {', '.join(sorted({*known, *own}))}."
                if known or own
                else "This route has no query parameters.",
                param=name[:80],
                code="unknown_parameter",
            )


def reads_query(*prefixes: str) -> Callable[[Endpoint], Endpoint]:
    """Marks an endpoint that reads query parameters with these prefixes from the request."""

    def _mark(endpoint: Endpoint) -> Endpoint:
        endpoint.query_names = prefixes  # type: ignore[attr-defined]
        return endpoint

    return _mark


def _collected(dependant: Dependant) -> frozenset[str]:
    names = {each.alias for each in dependant.query_params}
    return frozenset(names).union(*(_collected(each) for each in dependant.dependencies))
