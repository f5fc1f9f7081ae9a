"""/v1/moderations in OpenAI's format, on the built-in classifier; limited, priced and metered."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from core.errors import TollhouseError, Unavailable
from core.events import OpenedRequest, UsageKind
from core.ids import REQUEST, new_id
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import Reservation
from gateway.edge.decoding import Request as Body
from gateway.metering.meter import Ending, Meter, MeterServices
from gateway.request.exchange import Exchange
from gateway.serving.api.bodies import read_body
from gateway.serving.api.dependencies import (
    AdmissionDep,
    Caller,
    CatalogDep,
    ClockDep,
    LimitsDep,
    RejectionsDep,
    ScreenerDep,
    SpoolDep,
)
from gateway.serving.headers import limit_headers, response_headers
from gateway.serving.request_labels import labels_of
from moderation.openai_format import read_inputs, result

router = APIRouter(prefix="/v1", tags=["moderation"])
ROUTE = "/v1/moderations"
MODEL = "tollhouse-moderation"


class ModerationBody(Body, kw_only=True):
    input: str | list[Any]
    model: str | None = None


_decoder = msgspec.json.Decoder(ModerationBody)


def _labels(request: Request, caller: Caller) -> str | None:
    return labels_of(caller, Exchange(dict(request.scope), None, None))


LabelsDep = Annotated[str | None, Depends(_labels)]


@dataclass(frozen=True)
class _Call:
    """The admission and the metering of one call."""

    caller: Caller
    catalog: CatalogDep
    admission: AdmissionDep
    rejections: RejectionsDep
    spool: SpoolDep
    clock: ClockDep
    labels: LabelsDep

    async def reserve(self, request_id: str, timeout_s: float) -> Reservation:
        caller = self.caller
        request = AdmissionRequest(
            request_id=request_id,
            tenant_id=caller.tenant_id,
            project_id=caller.project_id,
            key_id=caller.key_id,
            model=self.catalog.first().name,
            plan=caller.plan,
            prompt_tokens=0,
            currency=caller.currency,
            max_output_tokens=1,
            deadline_s=timeout_s,
            labels=self.labels,
        )
        try:
            return await self.admission.reserve(request)
        except TollhouseError as error:
            self.rejections.count(error, request.tenant_id)
            raise

    def meter(self, request_id: str, price_version: str) -> Meter:
        caller = self.caller
        opened = OpenedRequest(
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
            opened_at=self.clock.now(),
            prompt_tokens=0,
            member_id=caller.member_id,
            labels=self.labels,
        )
        return Meter(MeterServices(self.spool, self.clock, _no_receipt), opened)


@router.post("/moderations")
async def moderate(
    request: Request,
    screener: ScreenerDep,
    call: Annotated[_Call, Depends(_Call)],
    limits: LimitsDep,
) -> JSONResponse:
    body = await read_body(request, limits, _decoder)
    texts = read_inputs(body.input)
    if screener is None or screener.classifier is None:
        raise Unavailable(
            "No moderation classifier is loaded.",
            next_step="Ask the operator to enable one.",
            code="no_classifier",
        )
    request_id = new_id(REQUEST)
    began = call.clock.monotonic()
    reservation = await call.reserve(request_id, limits.timeout_s)
    meter = call.meter(request_id, reservation.price_version)
    try:
        await meter.write_opened()
        reservation.keep()
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
    now = call.clock.now()
    headers = limit_headers("openai", reservation.limits(), call.caller.plan, now)
    millis = round((call.clock.monotonic() - began) * 1000)
    header_fields = {
        name.decode(): value.decode()
        for name, value in response_headers(request_id, millis, headers)
    }
    answer = {"id": f"modr-{request_id.rpartition('_')[2]}", "model": MODEL, "results": results}
    return JSONResponse(answer, headers=header_fields)


def _no_receipt(*_request_ids: str) -> None:
    """The classifier runs in this process: no engine keeps a receipt."""
