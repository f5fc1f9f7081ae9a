"""/admin/v1: the checklist of a month's end, and its signatures."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path

from billing.reports import month_end
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.billing.schemas import MonthSignature

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("money", "write"))]
Month = Annotated[str, Path(pattern=r"^\d{4}-\d{2}$", description="such as 2026-01, in UTC")]


@router.get("/months/{month}")
def get_month(month: Month, ctx: ReadAccess) -> dict[str, Any]:
    """The checklist as of now, and who signed. `changed`: entries reached the month after it."""
    now = ctx.clock.now()
    with ctx.database.read() as session:
        checks = month_end.checklist(session, now, month_end.known_month(month, now))
        signed = month_end.signatures(session, month)
        return {
            "month": month,
            "checklist": [asdict(each) for each in checks],
            "signatures": [month_end.describe(session, each) for each in signed],
        }


@router.post("/months/{month}/signatures", status_code=201)
def sign_month(month: Month, body: MonthSignature, ctx: WriteAccess) -> dict[str, Any]:
    """Sign a month off; 409 while a check is bad."""
    with ctx.database.transaction() as session:
        signed = month_end.sign(session, ctx.clock, month, ctx.actor.id, body.note)
        return month_end.describe(session, signed)
