"""Bodies of the small JSON routes: bounded, typed, with errors that name the field."""

from typing import TypeVar

import msgspec
from fastapi import Request

from gateway.exchange import ClientGone, Exchange
from gateway.schemas.decoding import decode
from gateway.wiring import Services

Body = TypeVar("Body")


async def read_body(
    request: Request, services: Services, decoder: "msgspec.json.Decoder[Body]"
) -> Body:
    exchange = Exchange(dict(request.scope), request.receive, None)
    try:
        raw = await exchange.body(services.pipeline.limits.max_body)
    except ClientGone:
        raw = b""
    return decode(decoder, raw)
