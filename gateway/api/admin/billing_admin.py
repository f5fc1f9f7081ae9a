"""/admin/v1 billing for the operator: prices, accounts, credits, credit notes."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from sqlalchemy import select

from billing import (
    accounts,
    credit_notes,
    credits,
    invoices,
    price_changes,
    prices,
)
from billing.models import PriceVersionRow
from billing.tax_ids import check_region, check_tax_id
from billing.views import minor, money, price_json
from core.money import Money, units_of
from gateway.api.admin import billing_schemas as bodies
from gateway.api.admin.access import OperatorContext, RequireOperator
from gateway.api.admin.billing import describe_account
from gateway.api.admin.billing_records import account_of, record, tenant_id_of

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "write"))]


@router.get("/prices")
def list_prices(ctx: ReadAccess, model: str = "") -> dict[str, Any]:
    with ctx.database.read() as session:
        query = select(PriceVersionRow).order_by(
            PriceVersionRow.model, PriceVersionRow.effective_from.desc()
        )
        if model:
            query = query.where(PriceVersionRow.model == model)
        return {"object": "list", "data": [price_json(each) for each in session.scalars(query)]}


@router.post("/prices", status_code=201)
def save_price(body: bodies.NewPrice, ctx: WriteAccess, tenant: str = "") -> dict[str, Any]:
    """Save a price after a trial on sample usage. 400: the price is invalid; 409: it overlaps another."""
    clock = ctx.clock
    with ctx.database.transaction() as session:
        draft = prices.PriceDraft(
            body.model,
            body.terms,
            body.effective_from or clock.now(),
            body.effective_to,
            tenant_id_of(session, tenant) if tenant else "",
            body.adapter,
            body.currency,
            body.discount_percent,
            body.note,
            ctx.actor.id,
        )
        created = price_changes.save(session, clock, draft)
        shown = price_json(session.get_one(PriceVersionRow, created.id))
        record(session, ctx, draft.tenant_id, "price.save", created.id, shown)
    return shown


@router.post("/tenants/{tenant}/credits", status_code=201)
def grant_credit(tenant: str, body: bodies.NewCredit, ctx: WriteAccess) -> dict[str, Any]:
    now = ctx.clock.now()
    with ctx.database.transaction() as session:
        tenant_id = account_of(session, ctx, tenant)
        account = accounts.lock_account(session, tenant_id)
        created = credits.grant(
            session,
            tenant_id=tenant_id,
            kind=body.kind,
            money=Money(units_of(body.amount), account.currency),
            reference=f"admin:{tenant_id}:{body.reference}",
            at=now,
            priority=body.priority,
            expires_at=body.expires_at,
            note=body.note,
        )
        shown = {
            "id": created.id,
            "kind": created.kind,
            "granted": money(created.granted, created.currency),
        }
        record(session, ctx, tenant_id, "credit.grant", created.id, shown)
    return shown


@router.patch("/tenants/{tenant}/billing")
def change_account(tenant: str, body: bodies.AccountChange, ctx: WriteAccess) -> dict[str, Any]:
    now = ctx.clock.now()
    changes = body.model_dump(exclude_unset=True, exclude_none=True)
    with ctx.database.transaction() as session:
        account = accounts.lock_account(session, account_of(session, ctx, tenant))
        if "anchor_day" in changes:
            accounts.set_anchor(session, account, changes.pop("anchor_day"), now)
        if "timezone" in changes:
            accounts.set_timezone(session, account, changes.pop("timezone"), now)
        for name, value in changes.items():
            setattr(account, name, value)
        if "tax_region" in changes and account.tax_region:
            account.tax_region = check_region(account.tax_region)
        if "tax_region" in changes or "tax_id" in changes:
            account.tax_id = check_tax_id(account.tax_id, account.tax_region)
        shown = describe_account(account)
        record(session, ctx, account.tenant_id, "billing.change", account.tenant_id, shown)
    return shown


@router.post("/invoices/{reference}/credit-notes", status_code=201)
def issue_credit_note(
    reference: str, body: bodies.NewCreditNote, ctx: WriteAccess
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        invoice = invoices.get(session, reference)
        note = credit_notes.issue(
            session,
            invoice_id=invoice.id,
            net_minor=body.net_minor,
            reason=body.reason,
            reference=f"admin:{invoice.id}:{body.reference}",
            at=ctx.clock.now(),
            refund=body.refund,
        )
        shown = {
            "number": note.label,
            "invoice": invoice.label,
            "net": minor(note.net_minor, note.currency),
            "tax": minor(note.tax_minor, note.currency),
            "outcome": note.outcome,
        }
        record(session, ctx, invoice.tenant_id, "credit_note.issue", note.id, shown)
    return shown
