"""Where payment providers send their events: verified on the raw body, kept, answered; the payments'
queue applies them. What is answered with 200 is in the inbox.
"""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from billing.payments import inbox
from billing.payments.base import Refused
from core import metrics
from core.errors import BadRequest, PayloadTooLarge
from gateway.api.access import House

router = APIRouter(tags=["webhooks"])
MOST_BYTES = 2**20


@router.post("/webhooks/stripe")
async def stripe_event(request: Request, services: House) -> JSONResponse:
    """One signed event of Stripe's. Twice is once; 400 where the signature is wrong."""
    body = await _raw(request)
    signature = request.headers.get("stripe-signature")

    def _keep() -> bool:
        event = services.payments.event(body, signature)
        with services.database.transaction() as session:
            return inbox.receive(session, services.payments.name, event, services.clock.now())

    try:
        new = await asyncio.to_thread(_keep)
    except Refused as error:
        metrics.payment_events.labels("refused").inc()
        raise BadRequest(
            str(error),
            next_step="Compare TOLLHOUSE_STRIPE_WEBHOOK_SECRET with the endpoint's at Stripe.",
            code="invalid_webhook",
        ) from None
    return JSONResponse({"received": True, "new": new})


async def _raw(request: Request) -> bytes:
    """Byte for byte as it was signed."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise PayloadTooLarge("An event is a megabyte at most.")
    return bytes(body)
