"""Webhooks of payment providers. An event is verified on its raw body and stored before the response
is sent; the payment queue applies it later.
"""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from billing.payments import inbox
from billing.payments.base import Refused
from core import metrics
from core.errors import BadRequest, PayloadTooLarge
from gateway.serving.api.dependencies import ClockDep, DatabaseDep, PaymentsDep

router = APIRouter(tags=["webhooks"])
MAX_BYTES = 2**20


@router.post("/webhooks/stripe")
async def stripe_event(
    request: Request, payments: PaymentsDep, database: DatabaseDep, clock: ClockDep
) -> JSONResponse:
    """Receive a signed Stripe event, idempotently. 400 means that the signature is invalid."""
    body = await _read_body(request)
    signature = request.headers.get("stripe-signature")

    def _store() -> bool:
        event = payments.event(body, signature)
        with database.transaction() as session:
            return inbox.receive(session, payments.name, event, clock.now())

    try:
        new = await asyncio.to_thread(_store)
    except Refused as error:
        metrics.payment_events.labels("refused").inc()
        raise BadRequest(
            str(error),
            next_step="Compare TOLLHOUSE_STRIPE_WEBHOOK_SECRET with the endpoint's secret at Stripe.",
            code="invalid_webhook",
        ) from None
    return JSONResponse({"received": True, "new": new})


async def _read_body(request: Request) -> bytes:
    """The body byte for byte, since the signature covers it."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise PayloadTooLarge(
                f"The event is larger than {MAX_BYTES >> 20} MiB.",
                next_step="Check that the sender is Stripe.",
            )
    return bytes(body)
