"""/admin/v1 billing for the operator: prices, accounts, credits, credit notes."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from sqlalchemy import select

from billing.accounts import accounts
from billing.adjustments import account_changes
from billing.adjustments.act_requests import ActRequest, Kind
from billing.invoicing import invoice_run, invoices
from billing.invoicing.tables import Invoice
from billing.invoicing.views import invoice_summary, price_json
from billing.pricing import price_lists, prices
from billing.pricing.tables import PriceVersionRow
from billing.rating import price_changes, price_imports
from billing.rating.price_imports import Terms
from core.money import units_of, units_of_minor
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.adjustments.routes import MoneyAccess, submitted
from gateway.admin.billing import schemas as bodies
from gateway.admin.billing.routes import account_of, record, tenant_id_of
from gateway.metering.spool_watch import wait_until_shipped
from gateway.serving.api.dependencies import SettingsDep
from gateway.serving.payments import make_taxes

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


@router.post("/prices/import")
def import_prices(body: bodies.PriceListFile, ctx: WriteAccess) -> dict[str, Any]:
    """Save what a price list changes, all of it or nothing; `dry_run` shows it alone."""
    listed = price_lists.wanted(body.content, body.models, every=body.all, region=body.region)
    terms = Terms(
        price_lists.percent_of(body.markup),
        body.effective_from or ctx.clock.now(),
        f"imported from a list, mark-up {body.markup.strip().removesuffix('%')} %",
        ctx.actor.id,
    )
    if body.dry_run:
        with ctx.database.read() as session:
            shown = price_imports.described(price_imports.compare(session, listed, terms))
    else:
        with ctx.database.transaction() as session:
            shown = price_imports.described(price_imports.save(session, ctx.clock, listed, terms))
            if shown["changes"]:
                record(session, ctx, "", "price.import", "prices", shown)
    return {"object": "price_import", "saved": not body.dry_run, **shown}


@router.post("/tenants/{tenant}/credits", status_code=201)
def grant_credit(
    tenant: str,
    body: bodies.NewCredit,
    ctx: MoneyAccess,
    settings: SettingsDep,
    response: Response,
) -> dict[str, Any]:
    """202 if a second operator has to confirm it."""
    expires = body.expires_at.isoformat() if body.expires_at else None
    with ctx.database.transaction() as session:
        tenant_id = account_of(session, ctx, tenant)
        asked = ActRequest(
            Kind.GRANT,
            tenant_id,
            f"admin:{tenant_id}:{body.reference}",
            units_of(body.amount),
            body.note,
            {"kind": body.kind, "priority": body.priority, "expires_at": expires},
        )
        return submitted(session, ctx, asked, settings, response)


@router.patch("/tenants/{tenant}/billing")
def change_account(tenant: str, body: bodies.AccountChange, ctx: WriteAccess) -> dict[str, Any]:
    now = ctx.clock.now()
    given = body.model_dump(exclude_unset=True)
    resettable = ("payment_terms_days", "payment_methods")
    changes = {name: it for name, it in given.items() if it is not None or name in resettable}
    with ctx.database.transaction() as session:
        account = accounts.lock_account(session, account_of(session, ctx, tenant))
        account_changes.change(session, account, changes, now)
        shown = account_changes.describe(account)
        record(session, ctx, account.tenant_id, "billing.change", account.tenant_id, shown)
    return shown


@router.post("/invoices/{reference}/credit-notes", status_code=201)
def issue_credit_note(
    reference: str,
    body: bodies.NewCreditNote,
    ctx: MoneyAccess,
    settings: SettingsDep,
    response: Response,
) -> dict[str, Any]:
    """202 if a second operator has to confirm it."""
    with ctx.database.transaction() as session:
        invoice = invoices.get(session, reference)
        asked = ActRequest(
            Kind.CREDIT_NOTE,
            invoice.id,
            f"admin:{invoice.id}:{body.reference}",
            units_of_minor(body.net_minor, invoice.currency),
            body.reason,
            {"refund": body.refund},
        )
        return submitted(session, ctx, asked, settings, response)


@router.post("/tenants/{tenant}/invoices/finalise", status_code=201)
def finalise(tenant: str, ctx: MoneyAccess, settings: SettingsDep) -> dict[str, Any]:
    """Finalise the ended billing periods without waiting for late usage, which is then on the next
    invoice. 409 if no ended period has anything to bill."""
    wait_until_shipped(settings)
    with ctx.database.transaction() as session:
        tenant_id = account_of(session, ctx, tenant)
    taxes = make_taxes(settings, ctx.clock)
    made = invoice_run.finalise_now(ctx.database, ctx.clock, tenant_id, taxes)
    with ctx.database.transaction() as session:
        rows = [session.get_one(Invoice, each) for each in made]
        for each in rows:
            record(session, ctx, tenant_id, "invoice.finalise", each.id, {"number": each.label})
        return {"object": "list", "data": [invoice_summary(each) for each in rows]}
