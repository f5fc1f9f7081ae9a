"""/v1/moderations in OpenAI's format, on the built-in classifier; limited, priced and metered."""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from core.errors import Unavailable
from core.events import OpenedRequest, UsageKind
from core.ids import REQUEST, new_id
from core.tenants.keys import Principal
from gateway.api.access import Caller, House
from gateway.api.bodies import read_body
from gateway.catalog.catalog import Target
from gateway.limits.admission import Spent, Wanted
from gateway.metering.meter import Ending, Meter
from gateway.request_headers import answer_headers, limit_headers
from gateway.schemas.decoding import Request as Body
from gateway.wiring import Services
from moderation.openai_shape import result, texts_of

router = APIRouter(prefix="/v1", tags=["moderation"])
ROUTE = "/v1/moderations"
MODEL = "tollhouse-moderation"


class ModerationBody(Body, kw_only=True):
    input: str | list[Any]
    model: str | None = None


_decoder = msgspec.json.Decoder(ModerationBody)


@router.post("/moderations")
async def moderate(request: Request, services: House, caller: Caller) -> JSONResponse:
    body = await read_body(request, services, _decoder)
    texts = texts_of(body.input)
    screener = services.screener
    if screener is None or screener.classifier is None:
        raise Unavailable(
            "No moderation classifier is loaded.",
            next_step="Ask the operator to enable one.",
            code="no_classifier",
        )
    request_id = new_id(REQUEST)
    began = services.clock.monotonic()
    pipeline = services.pipeline
    wanted = _wanted(request_id, services, caller)
    booking = await pipeline.admission.book(wanted)
    spent = Spent(0, 0, 0, served=False)
    try:
        opened = _opened(request_id, services, caller, booking.price_version)
        meter = Meter(services.spool, services.clock, opened, lambda _id: None)
        await meter.open()
        try:
            results = await asyncio.to_thread(
                lambda: [result(screener.score(text).scores) for text in texts]
            )
        except BaseException:
            meter.close_soon(Ending(0, 0, "error", 500, prompt_done=False), None)
            raise
        await meter.close(Ending(0, 0, "stop", 200, prompt_done=False), None)
        spent = Spent(0, 0, 0)
    finally:
        await booking.settle(spent)
    now = services.clock.now()
    headers = limit_headers("openai", booking.limits(), caller.plan, now)
    millis = round((services.clock.monotonic() - began) * 1000)
    told = {
        name.decode(): value.decode() for name, value in answer_headers(request_id, millis, headers)
    }
    answer = {"id": f"modr-{request_id.rpartition('_')[2]}", "model": MODEL, "results": results}
    return JSONResponse(answer, headers=told)


def _wanted(request_id: str, services: Services, caller: Principal) -> Wanted:
    model = services.pipeline.catalog.first()
    return Wanted(
        request_id=request_id,
        principal=caller,
        target=Target(model.name, model),
        route=ROUTE,
        prompt_tokens=0,
        max_tokens=1,
        choices=1,
        timeout_s=services.settings.request_timeout_s,
    )


def _opened(
    request_id: str, services: Services, caller: Principal, price_version: str
) -> OpenedRequest:
    return OpenedRequest(
        request_id=request_id,
        tenant_id=caller.tenant_id,
        project_id=caller.project_id,
        key_id=caller.key_id,
        kind=UsageKind.MODERATION,
        route=ROUTE,
        model=MODEL,
        adapter=None,
        adapter_digest=None,
        price_version=price_version,
        opened_at=services.clock.now(),
        prompt_tokens=0,
    )
