"""/admin/v1: the ledger of all tenants for accountants."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from billing.amounts import money
from billing.invoicing import recognition
from billing.ledger import account_statement, journal
from billing.ledger.account_statement import StatementQuery
from billing.pricing.exchange_rates import Converter
from billing.reports import receivables
from core.errors import BadRequest
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.billing.routes import tenant_id_of

Reporting = Annotated[
    str, Query(max_length=3, description="one currency for all, at the rate of the day")
]
router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "read"))]
Month = Annotated[str, Query(pattern=r"^\d{4}-\d{2}$", description="such as 2026-01, in UTC")]


@router.get("/trial-balance")
def trial_balance(ctx: ReadAccess, at: datetime | None = None, tenant: str = "") -> dict[str, Any]:
    """Debits, credits and balances by account, of the entries before `at`."""
    if at is not None and at.tzinfo is None:
        raise BadRequest(
            f"at is {at.isoformat()}, without a time zone.",
            next_step="Append Z for UTC.",
            param="at",
        )
    with ctx.database.read() as session:
        tenant_id = tenant_id_of(session, tenant) if tenant else ""
        return {"object": "list", "data": journal.trial_balance(session, at, tenant_id)}


@router.get("/receivables")
def get_receivables(ctx: ReadAccess, reporting: Reporting = "") -> dict[str, Any]:
    """Open amounts of all tenants by currency and days past due, in minor units."""
    now = ctx.clock.now()
    with ctx.database.read() as session:
        today = now.date()
        converter = Converter.load(session, reporting, today, today) if reporting else None
        rows = receivables.ageing(session, now, converter)
    return {"object": "list", "data": rows, "rates": converter.rates_used() if converter else []}


@router.get("/ledger")
def list_transactions(
    ctx: ReadAccess, tenant: str = "", search: str = "", limit: int = 100
) -> dict[str, Any]:
    """The newest transactions; `search` is part of a reference, memo, kind or tenant."""
    with ctx.database.read() as session:
        tenant_id = tenant_id_of(session, tenant) if tenant else ""
        rows = journal.transactions(
            session, tenant_id=tenant_id, search=search, limit=min(max(limit, 1), 500)
        )
    return {"object": "list", "data": rows}


@router.get("/ledger/accounts/{account}")
def account_statement_of(
    account: str,
    ctx: ReadAccess,
    *,
    tenant: str = "",
    currency: str = "USD",
    start: Annotated[datetime | None, Query(alias="from")] = None,
    end: Annotated[datetime | None, Query(alias="to")] = None,
    after: Annotated[int, Query(ge=0, le=2**62, description="`next` of the answer before")] = 0,
    limit: Annotated[int, Query(ge=1, le=account_statement.MOST)] = 100,
) -> dict[str, Any]:
    """The entries of an account by time, with the balance after each, and the opening balance."""
    with ctx.database.read() as session:
        tenant_id = tenant_id_of(session, tenant) if tenant else ""
        query = account_statement.check(
            StatementQuery(account, currency.upper(), tenant_id, start, end)
        )
        return account_statement.read(session, query, after=after, limit=limit)


@router.get("/journal", response_class=Response)
def month_journal(
    ctx: ReadAccess,
    month: Month,
    shape: journal.Shape = journal.Shape.PLAIN,
    accounts: Annotated[list[str] | None, Query(description="account=code")] = None,
) -> Response:
    """A month's journal as CSV, in the shape of an accounting program."""
    codes = dict(_code(each) for each in accounts or ())
    with ctx.database.read() as session:
        text = journal.journal(session, month, shape, codes)
    headers = {"content-disposition": f'attachment; filename="journal-{month}.csv"'}
    return Response(text, media_type="text/csv; charset=utf-8", headers=headers)


@router.get("/revenue-schedule")
def revenue_schedule(ctx: ReadAccess, tenant: str = "") -> dict[str, Any]:
    """What each month earns of fees that were billed ahead."""
    with ctx.database.read() as session:
        tenant_id = tenant_id_of(session, tenant) if tenant else ""
        rows = recognition.schedule(session, tenant_id)
    shown = [
        {"month": each["month"], "earned": money(int(str(each["units"])), str(each["currency"]))}
        for each in rows
    ]
    return {"object": "list", "data": shown}


def _code(given: str) -> tuple[str, str]:
    account, separator, code = given.partition("=")
    if not separator or not code:
        raise BadRequest(
            f"accounts has {given!r}.", next_step="Write it as revenue=4000.", param="accounts"
        )
    return account, code
