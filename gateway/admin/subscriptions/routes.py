"""/admin/v1: billing plans, and the subscriptions of tenants to them."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.adjustments.act_requests import ActRequest, Kind
from billing.pricing.exchange_rates import check_currency
from billing.reports import subscription_views
from billing.subscriptions import add_ons, subscriptions
from billing.subscriptions.tables import Plan
from core.ids import new_id
from core.money import units_of
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.adjustments.routes import MoneyAccess, submitted
from gateway.admin.billing import schemas as bodies
from gateway.admin.billing.routes import account_of, record
from gateway.edge.decoding import parse_datetime
from gateway.serving.api.dependencies import SettingsDep

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "write"))]
InvoiceReadAccess = Annotated[AdminContext, Depends(RequirePermission("invoices", "read"))]


@router.get("/billing-plans")
def list_plans(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        result = session.scalars(select(Plan).order_by(Plan.name))
        return {"object": "list", "data": [subscription_views.plan_json(each) for each in result]}


@router.post("/billing-plans", status_code=201)
def create_plan(body: bodies.NewPlan, ctx: WriteAccess) -> dict[str, Any]:
    fields = body.model_dump()
    fields |= {name: units_of(fields[name]) for name in subscriptions.AMOUNTS}
    with ctx.database.transaction() as session:
        created = subscriptions.create_plan(session, ctx.clock.now(), fields)
        shown = subscription_views.plan_json(created)
        record(session, ctx, "", "plan.create", created.id, shown)
        return shown


@router.get("/add-ons")
def list_add_ons(ctx: ReadAccess) -> dict[str, Any]:
    """The add-ons that tenants can add to their billing plan."""
    with ctx.database.read() as session:
        rows = [add_ons.describe(each) for each in add_ons.listed(session)]
    return {"object": "list", "data": rows}


@router.post("/add-ons", status_code=201)
def create_add_on(body: bodies.NewAddOn, ctx: WriteAccess) -> dict[str, Any]:
    currency = check_currency(body.currency, "currency")
    with ctx.database.transaction() as session:
        created = add_ons.create(
            session,
            ctx.clock.now(),
            body.name,
            units_of(body.fee),
            currency=currency,
            interval=body.interval,
        )
        shown = add_ons.describe(created)
        record(session, ctx, "", "add_on.create", created.id, shown)
    return shown


@router.get("/tenants/{tenant}/add-ons")
def list_add_ons_of(tenant: str, ctx: ReadAccess) -> dict[str, Any]:
    """All that the tenant has or had, the earliest first."""
    with ctx.database.transaction() as session:
        rows = add_ons.of_tenant(session, account_of(session, ctx, tenant))
    return {"object": "list", "data": rows}


@router.put("/tenants/{tenant}/add-ons")
def set_add_on(
    tenant: str,
    body: bodies.AddOnQuantity,
    ctx: MoneyAccess,
    settings: SettingsDep,
    response: Response,
) -> dict[str, Any]:
    """The tenant has this many units from now on; the fee is prorated. 202 if a second operator has to
    confirm it."""
    terms = {"add_on": body.add_on, "quantity": body.quantity}
    with ctx.database.transaction() as session:
        tenant_id = account_of(session, ctx, tenant)
        asked = ActRequest(Kind.ADD_ON, tenant_id, new_id("addon"), terms=terms)
        shown = submitted(session, ctx, asked, settings, response)
        if response.status_code == 202:
            return shown
        rows = add_ons.of_tenant(session, tenant_id)
    return {"object": "list", "data": rows}


@router.get("/subscription")
def own_subscriptions(ctx: InvoiceReadAccess) -> dict[str, Any]:
    """The tenant's subscriptions, the earliest first, with the use of a yearly commitment."""
    with ctx.database.read() as session:
        rows = subscription_views.subscriptions_json(session, ctx.scope.tenant_id, ctx.clock.now())
    return {"object": "list", "data": rows}


@router.get("/tenants/{tenant}/subscription")
def list_subscriptions(tenant: str, ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        tenant_id = account_of(session, ctx, tenant)
        rows = subscription_views.subscriptions_json(session, tenant_id, ctx.clock.now())
    return {"object": "list", "data": rows}


@router.post("/tenants/{tenant}/subscription", status_code=201)
def subscribe(
    tenant: str,
    body: bodies.Subscribe,
    ctx: MoneyAccess,
    settings: SettingsDep,
    response: Response,
) -> dict[str, Any]:
    """Move the tenant to the plan now, or from `starts_at` on; the previous plan's fee is prorated. 202
    if a second operator has to confirm it."""
    terms: dict[str, Any] = {
        "plan": body.plan,
        "seats": body.seats,
        "overrides": body.overrides,
    }
    if body.starts_at is not None:
        terms["starts_at"] = parse_datetime(body.starts_at.isoformat(), "starts_at").isoformat()
    with ctx.database.transaction() as session:
        tenant_id = account_of(session, ctx, tenant)
        asked = ActRequest(Kind.PLAN, tenant_id, new_id("subscribe"), terms=terms)
        return submitted(session, ctx, asked, settings, response)


@router.post("/tenants/{tenant}/subscription/cancel")
def cancel(tenant: str, body: bodies.CancelSubscription, ctx: WriteAccess) -> dict[str, Any]:
    """End the subscription now, or with `at_term_end` at the end of its month or year."""

    def _act(session: Session, tenant_id: str) -> object:
        return subscriptions.cancel(
            session, tenant_id, ctx.clock.now(), at_term_end=body.at_term_end
        )

    return _changed(tenant, ctx, "cancel", _act)


@router.post("/tenants/{tenant}/subscription/pause")
def pause(tenant: str, body: bodies.PauseSubscription, ctx: WriteAccess) -> dict[str, Any]:
    return _changed(
        tenant,
        ctx,
        "pause",
        lambda session, tenant_id: subscriptions.pause(
            session, tenant_id, ctx.clock.now(), body.until
        ),
    )


@router.post("/tenants/{tenant}/subscription/resume")
def resume(tenant: str, ctx: WriteAccess) -> dict[str, Any]:
    return _changed(
        tenant,
        ctx,
        "resume",
        lambda session, tenant_id: subscriptions.resume(session, tenant_id, ctx.clock.now()),
    )


def _changed(
    tenant: str, ctx: OperatorContext, name: str, act: Callable[[Session, str], object]
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        tenant_id = account_of(session, ctx, tenant)
        act(session, tenant_id)
        rows = subscription_views.subscriptions_json(session, tenant_id, ctx.clock.now())
        record(session, ctx, tenant_id, f"subscription.{name}", tenant_id, rows[-1])
    return {"object": "list", "data": rows}
