"""/admin/v1: payments, refunds and payment methods."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from sqlalchemy import select

from billing.models import Payment, PaymentMethod
from billing.payments import commands
from billing.payments.views import describe_method, describe_payment, describe_refund
from core.tenants import audit
from gateway.api.admin.access import Allowed, OperatorOnly, OperatorVisit, Visit
from gateway.payment_setup import setup_link
from gateway.schemas.billing import NewRefund, SetupLink

router = APIRouter(prefix="/admin/v1", tags=["payments"])
Sees = Annotated[Visit, Depends(Allowed("payments", "read"))]
Changes = Annotated[Visit, Depends(Allowed("payments", "write"))]
Operates = Annotated[OperatorVisit, Depends(OperatorOnly("prices", "write"))]


@router.get("/payments")
def list_payments(visit: Sees, limit: int = 100) -> dict[str, Any]:
    with visit.services.database.read() as session:
        rows = session.scalars(
            select(Payment)
            .where(Payment.tenant_id == visit.scope.tenant_id)
            .order_by(Payment.created_at.desc())
            .limit(min(max(limit, 1), 500))
        )
        return {"object": "list", "data": [describe_payment(session, each) for each in rows]}


@router.get("/payment-methods")
def list_methods(visit: Sees) -> dict[str, Any]:
    with visit.services.database.read() as session:
        rows = session.scalars(
            select(PaymentMethod)
            .where(
                PaymentMethod.tenant_id == visit.scope.tenant_id,
                PaymentMethod.detached_at.is_(None),
            )
            .order_by(PaymentMethod.created_at.desc())
        )
        return {"object": "list", "data": [describe_method(session, each) for each in rows]}


@router.post("/payment-methods/setup")
def setup_method(visit: Changes, body: SetupLink | None = None) -> dict[str, str]:
    """The URL of the provider's page for adding a card. Card numbers never reach the gateway."""
    link = setup_link(visit.services, visit.scope, (body.return_url if body else None) or "")
    return {"url": link}


@router.post("/payments/{payment_id}/refunds", status_code=201)
def refund(payment_id: str, body: NewRefund, visit: Operates) -> dict[str, Any]:
    """Post the refund to the ledger and request it; it is `pending` until the provider confirms."""
    with visit.services.database.transaction() as session:
        made = commands.request_refund(
            session,
            payment_id,
            body.amount_minor,
            f"admin:{payment_id}:{body.reference}",
            visit.services.clock.now(),
            reason=body.reason,
        )
        shown = describe_refund(made)
        audit.record_house(
            session, visit.services.clock, visit.actor.id, "payment.refund", made.id, None, shown
        )
    return shown
