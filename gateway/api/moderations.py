"""/v1/moderations in OpenAI's format, on the built-in classifier; limited, priced and metered."""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from core.errors import TollhouseError, Unavailable
from core.events import OpenedRequest, UsageKind
from core.ids import REQUEST, new_id
from core.tenants.keys import Principal
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import Reservation
from gateway.api.access import Caller, ServicesDep
from gateway.api.bodies import read_body
from gateway.http.headers import limit_headers, response_headers
from gateway.inference.decoding import Request as Body
from gateway.metering.meter import Ending, Meter, MeterServices
from gateway.wiring import Services
from moderation.openai_format import read_inputs, result

router = APIRouter(prefix="/v1", tags=["moderation"])
ROUTE = "/v1/moderations"
MODEL = "tollhouse-moderation"


class ModerationBody(Body, kw_only=True):
    input: str | list[Any]
    model: str | None = None


_decoder = msgspec.json.Decoder(ModerationBody)


@router.post("/moderations")
async def moderate(request: Request, services: ServicesDep, caller: Caller) -> JSONResponse:
    body = await read_body(request, services, _decoder)
    texts = read_inputs(body.input)
    screener = services.screener
    if screener is None or screener.classifier is None:
        raise Unavailable(
            "No moderation classifier is loaded.",
            next_step="Ask the operator to enable one.",
            code="no_classifier",
        )
    request_id = new_id(REQUEST)
    began = services.clock.monotonic()
    reservation = await _reserve(services, _admission_request(request_id, services, caller))
    opened = _opened(request_id, services, caller, reservation.price_version)
    meter = Meter(MeterServices(services.spool, services.clock, _no_receipt), opened)
    try:
        await meter.write_opened()
        try:
            results = await asyncio.to_thread(
                lambda: [result(screener.score(text).scores) for text in texts]
            )
        except BaseException:
            meter.close_soon(Ending(0, 0, "error", 500, prompt_done=False), None)
            raise
        await meter.close(Ending(0, 0, "stop", 200, prompt_done=False), None)
    finally:
        await reservation.settle(meter.event)
    now = services.clock.now()
    headers = limit_headers("openai", reservation.limits(), caller.plan, now)
    millis = round((services.clock.monotonic() - began) * 1000)
    header_fields = {
        name.decode(): value.decode()
        for name, value in response_headers(request_id, millis, headers)
    }
    answer = {"id": f"modr-{request_id.rpartition('_')[2]}", "model": MODEL, "results": results}
    return JSONResponse(answer, headers=header_fields)


async def _reserve(services: Services, request: AdmissionRequest) -> Reservation:
    try:
        return await services.pipeline.admission.reserve(request)
    except TollhouseError as error:
        services.rejections.count(error, request.tenant_id)
        raise


def _no_receipt(*_request_ids: str) -> None:
    """The classifier runs in this process: no engine keeps a receipt."""


def _admission_request(request_id: str, services: Services, caller: Principal) -> AdmissionRequest:
    return AdmissionRequest(
        request_id=request_id,
        tenant_id=caller.tenant_id,
        project_id=caller.project_id,
        key_id=caller.key_id,
        model=services.pipeline.catalog.first().name,
        plan=caller.plan,
        prompt_tokens=0,
        max_output_tokens=1,
        deadline_s=services.settings.request_timeout_s,
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
        member_id=caller.member_id,
    )
