"""/admin/v1: a tenant's billing account, invoices, credit and budgets."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse, Response
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from billing.accounts import accounts
from billing.accounts.tables import BillingAccount
from billing.adjustments import account_changes
from billing.amounts import money
from billing.invoicing import credit_notes, invoices
from billing.invoicing.printing import as_pdf, credit_note_page, invoice_page
from billing.invoicing.tables import Invoice
from billing.invoicing.views import invoice_json, invoice_summary
from billing.ledger.tables import CreditGrant
from billing.notices import budgets
from billing.notices.tables import Budget
from core.errors import BadRequest, NotFound
from core.money import Money, units_of
from core.tenants import audit, audit_chain
from core.tenants.models import ApiKey, AuditEntry, Project, Tenant
from gateway.admin.access import AdminContext, OperatorContext, RequirePermission
from gateway.admin.billing.schemas import EndUserErasure, NewBudget
from gateway.admin.stored_data.end_users import MOST_ERASURES
from gateway.admin.stored_data.stored_data import StoredData
from gateway.edge.threads import Work, run_queued
from gateway.serving.api.dependencies import AlertTargetsDep, OperatorToken, SettingsDep


def tenant_id_of(session: Session, name_or_id: str) -> str:
    result = session.scalar(
        select(Tenant.id).where(or_(Tenant.name == name_or_id, Tenant.id == name_or_id))
    )
    if result is None:
        raise NotFound(f"There is no tenant {name_or_id!r}.", next_step="GET /admin/v1/tenants")
    return result


def account_of(session: Session, ctx: OperatorContext, name_or_id: str) -> str:
    """The tenant's id. Opens its billing account if it has none."""
    tenant_id = tenant_id_of(session, name_or_id)
    accounts.ensure_account(session, tenant_id, ctx.clock.now())
    return tenant_id


def record(
    session: Session,
    ctx: OperatorContext,
    tenant_id: str,
    action: str,
    target: str,
    after: dict[str, Any],
) -> None:
    """Write to the audit log of the tenant concerned, in the same transaction."""
    audit_chain.append(
        session,
        AuditEntry(
            tenant_id=tenant_id or None,
            at=ctx.clock.now(),
            actor=ctx.actor.id,
            action=action,
            target=target,
            before=None,
            after=after,
        ),
    )


router = APIRouter(prefix="/admin/v1", tags=["billing"])
InvoiceReadAccess = Annotated[AdminContext, Depends(RequirePermission("invoices", "read"))]
BudgetReadAccess = Annotated[AdminContext, Depends(RequirePermission("budgets", "read"))]
EraseAccess = Annotated[AdminContext, Depends(RequirePermission("members", "write"))]
BudgetWriteAccess = Annotated[AdminContext, Depends(RequirePermission("budgets", "write"))]


@router.get("/billing")
def get_account(ctx: InvoiceReadAccess) -> dict[str, Any]:
    """The billing account and its remaining credit."""
    with ctx.database.read() as session:
        account = session.get(BillingAccount, ctx.scope.tenant_id)
        if account is None:
            return {"tenant_id": ctx.scope.tenant_id, "opened": False, "credit": []}
        grants = session.scalars(
            select(CreditGrant)
            .where(CreditGrant.tenant_id == account.tenant_id)
            .order_by(CreditGrant.granted_at.desc())
            .limit(200)
        )
        return account_changes.describe(account) | {"credit": [_grant(each) for each in grants]}


@router.get("/invoices")
def list_invoices(ctx: InvoiceReadAccess, limit: int = 100) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = session.scalars(
            select(Invoice)
            .where(Invoice.tenant_id == ctx.scope.tenant_id)
            .order_by(Invoice.period_start.desc())
            .limit(min(max(limit, 1), 500))
        )
        return {"object": "list", "data": [invoice_summary(each) for each in rows]}


@router.get("/invoices/{reference}")
def get_invoice(reference: str, ctx: InvoiceReadAccess) -> dict[str, Any]:
    """Get an invoice by id or number, with every line and its usage."""
    with ctx.database.read() as session:
        return invoice_json(session, _tenant_invoice(session, ctx, reference))


@router.get("/invoices/{reference}/page", response_class=HTMLResponse)
def get_invoice_page(reference: str, ctx: InvoiceReadAccess) -> HTMLResponse:
    with ctx.database.read() as session:
        return HTMLResponse(invoice_page(session, _tenant_invoice(session, ctx, reference)))


@router.get("/invoices/{reference}/pdf", response_class=Response)
def get_invoice_pdf(reference: str, ctx: InvoiceReadAccess) -> Response:
    with ctx.database.read() as session:
        page = invoice_page(session, _tenant_invoice(session, ctx, reference))
    return Response(as_pdf(page), media_type="application/pdf")


@router.get("/credit-notes/{reference}/pdf", response_class=Response)
def get_credit_note_pdf(reference: str, ctx: InvoiceReadAccess) -> Response:
    """Get a credit note by id or number."""
    with ctx.database.read() as session:
        note = credit_notes.get(session, reference)
        if note.tenant_id != ctx.scope.tenant_id:
            raise credit_notes.unknown(reference)
        page = credit_note_page(session, note)
    return Response(as_pdf(page), media_type="application/pdf")


@router.get("/budgets")
def list_budgets(ctx: BudgetReadAccess) -> dict[str, Any]:
    now = ctx.clock.now()
    with ctx.database.read() as session:
        account = session.get(BillingAccount, ctx.scope.tenant_id)
        zone = account.timezone if account else "UTC"
        rows = session.scalars(
            select(Budget)
            .where(Budget.tenant_id == ctx.scope.tenant_id, Budget.ended_at.is_(None))
            .order_by(Budget.created_at, Budget.id)
        ).all()
        listed = []
        for each in rows:
            window = budgets.window_of(each.window, now, zone)
            spent, credited = budgets.spent_in(session, each, window)
            listed.append(_budget(each) | {"spent": money(spent - credited, each.currency)})
    return {"object": "list", "data": listed}


@router.post("/budgets", status_code=201)
def create_budget(
    body: NewBudget, ctx: BudgetWriteAccess, targets: AlertTargetsDep
) -> dict[str, Any]:
    """`webhook_secret` signs the messages to `webhooks`; only this answer shows it."""
    tenant_id = ctx.scope.tenant_id
    targets.check(body.webhooks, body.emails)
    with ctx.database.transaction() as session:
        account = session.get(BillingAccount, tenant_id)
        target = _target(session, tenant_id, body)
        budget = budgets.create(
            session,
            ctx.clock,
            tenant_id=tenant_id,
            scope=body.scope,
            scope_id=target,
            cap=Money(units_of(body.cap), account.currency if account else "USD"),
            window=body.window,
            hard=body.hard,
            thresholds=tuple(body.thresholds),
            webhooks=tuple(body.webhooks),
            emails=tuple(body.emails),
            name=body.name,
        )
        shown = _budget(budget)
        audit.record(
            session, ctx.scope, ctx.clock, "budget.create", budget.id, before=None, after=shown
        )
        secret = budget.webhook_secret
    return shown | ({"webhook_secret": secret} if secret else {})


@router.delete("/budgets/{budget_id}")
def end_budget(budget_id: str, ctx: BudgetWriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        row = session.get(Budget, budget_id)
        if row is None or row.tenant_id != ctx.scope.tenant_id or row.ended_at:
            raise NotFound(f"There is no budget {budget_id!r}.", next_step="GET /admin/v1/budgets")
        before = _budget(row)
        row.ended_at = ctx.clock.now()
        audit.record(session, ctx.scope, ctx.clock, "budget.end", row.id, before=before, after=None)
    return {"ended": budget_id}


@router.post("/erasures")
async def erase(
    body: EndUserErasure, ctx: EraseAccess, settings: SettingsDep, token: OperatorToken
) -> dict[str, int]:
    """Erase an end user's name from the tenant's usage, and their stored texts. Counts and amounts
    stay. One erasure of a tenant runs at a time."""
    stored = StoredData.of(ctx.database, settings, ctx.clock, token)
    work = partial(stored.erase_end_user, ctx.scope, body.end_user)
    return await run_queued(Work.ERASURES, ctx.scope.tenant_id, MOST_ERASURES, work)


def _tenant_invoice(session: Session, ctx: AdminContext, reference: str) -> Invoice:
    row = invoices.get(session, reference)
    if row.tenant_id != ctx.scope.tenant_id:
        raise NotFound(f"There is no invoice {reference!r}.", next_step="GET /admin/v1/invoices")
    return row


def _target(session: Session, tenant_id: str, body: NewBudget) -> str:
    """The id that the budget applies to. BadRequest where the tenant has no such project or key."""
    if body.scope == "tenant":
        return tenant_id
    table = Project if body.scope == "project" else ApiKey
    row: Any = session.get(table, body.scope_id)
    if row is None or row.tenant_id != tenant_id:
        raise BadRequest(
            f"There is no {body.scope} {body.scope_id!r}.",
            next_step=f"Set scope_id to the id of one of the tenant's {body.scope}s.",
            param="scope_id",
        )
    return body.scope_id


def _budget(each: Budget) -> dict[str, Any]:
    names = (
        "id",
        "scope",
        "scope_id",
        "name",
        "window",
        "hard",
        "thresholds",
        "webhooks",
        "emails",
    )
    shown = {name: getattr(each, name) for name in names}
    return shown | {"cap": money(each.cap, each.currency)}


def _grant(each: CreditGrant) -> dict[str, Any]:
    return {
        "id": each.id,
        "kind": each.kind,
        "granted": money(each.granted, each.currency),
        "remaining": money(each.remaining, each.currency),
        "priority": each.priority,
        "granted_at": each.granted_at.isoformat(),
        "expires_at": each.expires_at.isoformat() if each.expires_at else None,
        "note": each.note,
    }
