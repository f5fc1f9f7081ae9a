"""/admin/v1: acts on money, their previews and their confirmation by a second operator."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from sqlalchemy.orm import Session

from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.adjustments.money_acts import FourEyes
from billing.amounts import money
from billing.payments import dunning
from core.money import units_of
from core.settings import Settings
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.billing.schemas import NewMoneyAct, Rejection
from gateway.serving.api.dependencies import SettingsDep

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "read"))]
MoneyAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "write"))]


def submitted(
    session: Session,
    ctx: OperatorContext,
    asked: ActRequest,
    settings: Settings,
    response: Response,
) -> dict[str, Any]:
    """What was posted, or the act with status 202 while it waits for a second operator."""
    rule = FourEyes.of(settings.four_eyes_above)
    act = money_acts.submit(session, ctx.clock, asked, ctx.actor.id, rule)
    if act.status == money_acts.POSTED:
        return act.result
    response.status_code = 202
    return money_acts.describe(act)


@router.get("/money-acts")
def list_acts(
    ctx: ReadAccess, status: str = "", target: str = "", limit: int = 100
) -> dict[str, Any]:
    """The newest first. `status` is waiting, posted or rejected; `target` an id."""
    with ctx.database.read() as session:
        rows = money_acts.listed(
            session, status=status, target=target, limit=min(max(limit, 1), 500)
        )
        return {"object": "list", "data": [money_acts.describe(each) for each in rows]}


@router.post("/money-acts", status_code=201)
def act_on_money(
    body: NewMoneyAct, ctx: MoneyAccess, settings: SettingsDep, response: Response
) -> dict[str, Any]:
    """Post an act; 202 if a second operator has to confirm it."""
    rule = FourEyes.of(settings.four_eyes_above)
    with ctx.database.transaction() as session:
        act = money_acts.submit(session, ctx.clock, _asked(body), ctx.actor.id, rule)
        shown = money_acts.describe(act)
    if act.status == money_acts.WAITING:
        response.status_code = 202
    dunning.settle(ctx.database, ctx.clock)
    return shown


@router.post("/money-acts/preview")
def preview(body: NewMoneyAct, ctx: MoneyAccess, settings: SettingsDep) -> dict[str, Any]:
    """The postings that the act would make now. Nothing is stored."""
    with ctx.database.transaction() as session:
        seen = money_acts.preview(session, ctx.clock, _asked(body))
    currency = seen.subject.currency
    return {
        "tenant_id": seen.subject.tenant_id,
        "target": seen.subject.target,
        "amount": money(seen.subject.amount, currency),
        "needs_second": FourEyes.of(settings.four_eyes_above).needs_second(seen.subject.amount),
        "postings": [
            {"kind": each.kind, "account": each.account, "amount": money(each.units, currency)}
            for each in seen.postings
        ],
        "changes": seen.remarks,
    }


@router.post("/money-acts/{act_id}/confirm")
def confirm(act_id: str, ctx: MoneyAccess) -> dict[str, Any]:
    """By another operator than the one who asked; 403 otherwise."""
    with ctx.database.transaction() as session:
        shown = money_acts.describe(money_acts.confirm(session, ctx.clock, act_id, ctx.actor.id))
    dunning.settle(ctx.database, ctx.clock)
    return shown


@router.post("/money-acts/{act_id}/reject")
def reject(act_id: str, body: Rejection, ctx: MoneyAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        act = money_acts.reject(session, ctx.clock, act_id, ctx.actor.id, body.reason)
        return money_acts.describe(act)


def _asked(body: NewMoneyAct) -> ActRequest:
    kind = Kind(body.kind)
    # The command line and earlier versions know a bank's reference by this name.
    prefix = "manual" if kind is Kind.WIRE else f"admin:{body.target}"
    return ActRequest(
        kind,
        body.target,
        f"{prefix}:{body.reference}",
        None if body.amount is None else units_of(body.amount),
        body.reason,
        body.terms,
    )
