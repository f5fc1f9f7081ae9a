"""/admin/v1: payments, refunds and payment methods."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import select

from billing.adjustments.act_requests import ActRequest, Kind
from billing.payments import inbox
from billing.payments.base import Refused
from billing.payments.tables import Payment, PaymentMethod
from billing.payments.views import describe_method, describe_payment
from core import metrics
from core.errors import BadRequest, PayloadTooLarge
from core.money import units_of_minor
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.adjustments.routes import MoneyAccess, submitted
from gateway.admin.billing.schemas import NewRefund, SetupLink
from gateway.serving.api.dependencies import (
    CardPagesDep,
    ClockDep,
    DatabaseDep,
    PaymentsDep,
    SettingsDep,
)

router = APIRouter(prefix="/admin/v1", tags=["payments"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("payments", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("payments", "write"))]


@router.get("/payments")
def list_payments(ctx: ReadAccess, limit: int = 100) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = session.scalars(
            select(Payment)
            .where(Payment.tenant_id == ctx.scope.tenant_id)
            .order_by(Payment.created_at.desc())
            .limit(min(max(limit, 1), 500))
        )
        return {"object": "list", "data": [describe_payment(session, each) for each in rows]}


@router.get("/payment-methods")
def list_methods(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = session.scalars(
            select(PaymentMethod)
            .where(
                PaymentMethod.tenant_id == ctx.scope.tenant_id,
                PaymentMethod.detached_at.is_(None),
            )
            .order_by(PaymentMethod.created_at.desc())
        )
        return {"object": "list", "data": [describe_method(session, each) for each in rows]}


@router.post("/payment-methods/setup")
def setup_method(
    ctx: WriteAccess, card_pages: CardPagesDep, body: SetupLink | None = None
) -> dict[str, str]:
    """The URL of the provider's page for adding a card. Card numbers never reach the gateway."""
    return {"url": card_pages.link(ctx.scope, (body.return_url if body else None) or "")}


@router.post("/payment-methods/portal")
def open_portal(
    ctx: WriteAccess, card_pages: CardPagesDep, body: SetupLink | None = None
) -> dict[str, str]:
    """The URL of the provider's billing portal: payment methods and past invoices."""
    return {"url": card_pages.portal(ctx.scope, (body.return_url if body else None) or "")}


@router.get("/payment-methods/bank-transfer")
def bank_transfer(ctx: ReadAccess, card_pages: CardPagesDep) -> dict[str, Any]:
    """The account for bank transfers through the provider; 409 unless they are enabled."""
    found = card_pages.bank_instructions(ctx.scope)
    rows = [{"name": name, "value": value} for name, value in found.rows]
    return {"currency": found.currency, "details": rows}


@router.post("/payments/{payment_id}/refunds", status_code=201)
def refund(
    payment_id: str,
    body: NewRefund,
    ctx: MoneyAccess,
    settings: SettingsDep,
    response: Response,
) -> dict[str, Any]:
    """Post the refund to the ledger and request it; it is `pending` until the provider confirms. 202 if
    a second operator has to confirm it first."""
    with ctx.database.transaction() as session:
        payment = session.get(Payment, payment_id)
        minor = body.amount_minor
        units = units_of_minor(minor, payment.currency) if minor and payment else None
        asked = ActRequest(
            Kind.REFUND, payment_id, f"admin:{payment_id}:{body.reference}", units, body.reason
        )
        return submitted(session, ctx, asked, settings, response)


# Webhooks of payment providers. An event is verified on its raw body and stored before the response
# is sent; the payment queue applies it later.


webhook_router = APIRouter(tags=["webhooks"])
MAX_BYTES = 2**20


@webhook_router.post("/webhooks/stripe")
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
