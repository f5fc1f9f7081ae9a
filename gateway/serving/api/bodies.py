"""Request bodies of the small JSON routes: limited in size, typed, with errors that name the field."""

from functools import partial
from typing import TypeVar

import msgspec
from fastapi import Request

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
