"""/admin/v1: bank statements, and the wires that they bring."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from billing.adjustments.money_acts import FourEyes
from billing.bank import wires
from billing.bank.tables import BankLine
from billing.bank.wires import Clerk
from billing.payments import dunning
from core.settings import Settings
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.billing.schemas import BankLineReason, BankLineTarget, BankStatement
from gateway.serving.api.dependencies import SettingsDep

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "read"))]
MoneyAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "write"))]


@router.post("/bank-statements", status_code=201)
def import_statement(
    body: BankStatement, ctx: MoneyAccess, settings: SettingsDep
) -> dict[str, Any]:
    """Stores the new lines of a statement and books what they name; all of the file or nothing. A line
    that was imported before changes nothing."""
    lines = wires.parse(body.content.encode(), body.columns)
    with ctx.database.transaction() as session:
        result = wires.import_lines(session, lines, _clerk(ctx, settings))
        rows = [wires.describe(session, wires.get(session, each)) for each in result.lines]
    dunning.settle(ctx.database, ctx.clock)
    counts = {name: getattr(result, name) for name in ("matched", "unmatched", "ignored", "known")}
    return {"object": "list", **counts, "data": rows}


@router.get("/bank-lines")
def list_bank_lines(
    ctx: ReadAccess, status: str = "", limit: Annotated[int, Query(ge=1, le=500)] = 200
) -> dict[str, Any]:
    """The newest first. `status` is unmatched, matched, ignored or dismissed."""
    with ctx.database.read() as session:
        rows = wires.listed(session, status, limit)
        return {"object": "list", "data": [wires.describe(session, each) for each in rows]}


@router.post("/bank-lines/{line_id}/assign")
def assign_line(
    line_id: str, body: BankLineTarget, ctx: MoneyAccess, settings: SettingsDep
) -> dict[str, Any]:
    """Book an unmatched line for an invoice, or for a tenant: its open invoices, then its wallet."""
    return _changed(
        ctx, lambda session: wires.assign(session, line_id, body.target, _clerk(ctx, settings))
    )


@router.post("/bank-lines/{line_id}/unassign")
def unassign_line(
    line_id: str, body: BankLineReason, ctx: MoneyAccess, settings: SettingsDep
) -> dict[str, Any]:
    """Undo what was booked for a line."""
    return _changed(
        ctx, lambda session: wires.unassign(session, line_id, _clerk(ctx, settings), body.reason)
    )


@router.post("/bank-lines/{line_id}/dismiss")
def dismiss_line(line_id: str, body: BankLineReason, ctx: MoneyAccess) -> dict[str, Any]:
    """Mark a line that pays no invoice as handled."""
    return _changed(ctx, lambda session: wires.dismiss(session, line_id, ctx.actor.id, body.reason))


def _changed(ctx: OperatorContext, act: Any) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        line: BankLine = act(session)
        shown = wires.describe(session, line)
    dunning.settle(ctx.database, ctx.clock)
    return shown


def _clerk(ctx: OperatorContext, settings: Settings) -> Clerk:
    return Clerk(ctx.clock, ctx.actor.id, FourEyes.of(settings.four_eyes_above))
