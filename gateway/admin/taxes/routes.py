"""/admin/v1 taxes for the operator: rates, exemption certificates, the seller's place of taxation."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from sqlalchemy import select

from billing.accounts import accounts
from billing.accounts.tables import Seller
from billing.accounts.tax_ids import check_region
from billing.invoicing import sellers
from billing.taxes import tax_exemptions, tax_rates
from billing.taxes.tables import TaxExemption, TaxRate
from core.money import units_of
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.billing import schemas as bodies
from gateway.admin.billing.routes import account_of, record, tenant_id_of

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "write"))]


@router.get("/tax-rates")
def list_tax_rates(ctx: ReadAccess, region: str = "") -> dict[str, Any]:
    with ctx.database.read() as session:
        query = select(TaxRate).order_by(TaxRate.region, TaxRate.name, TaxRate.effective_from)
        rows = session.scalars(query.where(TaxRate.region == region) if region else query)
        return {"object": "list", "data": [_rate(each) for each in rows]}


@router.post("/tax-rates", status_code=201)
def add_tax_rate(body: bodies.NewTaxRate, ctx: WriteAccess) -> dict[str, Any]:
    start = body.effective_from or ctx.clock.now()
    ppm = units_of(body.percent) // 10**8
    with ctx.database.transaction() as session:
        region = check_region(body.region)
        created = tax_rates.add_rate(session, region, body.name, ppm, start)
        shown = _rate(created)
        record(session, ctx, "", "tax.set", f"{region} {body.name}", shown)
    return shown


@router.get("/seller")
def get_seller(ctx: ReadAccess) -> dict[str, Any]:
    """The issuer of invoices."""
    with ctx.database.read() as session:
        found = session.get(Seller, accounts.DEFAULT_SELLER_ID)
        return sellers.describe(found) if found else {}


@router.patch("/seller")
def change_seller(body: bodies.SellerChange, ctx: WriteAccess) -> dict[str, Any]:
    """Change what invoices state about their issuer. Final invoices do not change."""
    given = {name: getattr(body, name) for name in body.model_fields_set}
    changes = {name: value for name, value in given.items() if value is not None}
    with ctx.database.transaction() as session:
        seller = sellers.change(session, changes)
        shown = sellers.describe(seller)
        record(session, ctx, "", "seller.change", seller.id, shown)
    return shown


@router.get("/tenants/{tenant}/tax-exemptions")
def list_tax_exemptions(tenant: str, ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        found = tax_exemptions.of_tenant(session, tenant_id_of(session, tenant))
        return {"object": "list", "data": [_exemption(each) for each in found]}


@router.post("/tenants/{tenant}/tax-exemptions", status_code=201)
def add_tax_exemption(
    tenant: str, body: bodies.NewTaxExemption, ctx: WriteAccess
) -> dict[str, Any]:
    """Record an exemption certificate. It covers supplies from `valid_from` until before `valid_to`."""
    now = ctx.clock.now()
    with ctx.database.transaction() as session:
        tenant_id = account_of(session, ctx, tenant)
        created = tax_exemptions.record(
            session,
            tenant_id=tenant_id,
            number=body.number,
            region=check_region(body.region) if body.region else "",
            valid_from=body.valid_from or now,
            valid_to=body.valid_to,
            recorded_by=ctx.actor.id,
            at=now,
        )
        shown = _exemption(created)
        record(session, ctx, tenant_id, "tax_exemption.add", created.id, shown)
    return shown


@router.delete("/tenants/{tenant}/tax-exemptions/{exemption}")
def end_tax_exemption(tenant: str, exemption: str, ctx: WriteAccess) -> dict[str, Any]:
    """End a certificate now. Earlier supplies stay exempt."""
    with ctx.database.transaction() as session:
        tenant_id = tenant_id_of(session, tenant)
        ended = tax_exemptions.end(session, tenant_id, exemption, ctx.clock.now())
        shown = _exemption(ended)
        record(session, ctx, tenant_id, "tax_exemption.end", ended.id, shown)
    return shown


def _rate(each: TaxRate) -> dict[str, Any]:
    return {
        "region": each.region,
        "name": each.name,
        "rate_ppm": each.rate_ppm,
        "effective_from": each.effective_from.isoformat(),
        "effective_to": each.effective_to.isoformat() if each.effective_to else None,
    }


def _exemption(each: TaxExemption) -> dict[str, Any]:
    return {
        "id": each.id,
        "tenant_id": each.tenant_id,
        "number": each.number,
        "region": each.region,
        "valid_from": each.valid_from.isoformat(),
        "valid_to": each.valid_to.isoformat() if each.valid_to else None,
    }
