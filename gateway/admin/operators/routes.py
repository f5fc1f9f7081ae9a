"""/admin/v1: named operators."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import operators
from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.billing.schemas import NewOperator

router = APIRouter(prefix="/admin/v1", tags=["operators"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("roles", "read"))]
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("roles", "write"))]


@router.get("/operators")
def list_operators(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = [operators.describe(each) for each in operators.everyone(session)]
    return {"object": "list", "data": rows}


@router.post("/operators", status_code=201)
def add_operator(body: NewOperator, ctx: WriteAccess) -> dict[str, Any]:
    """The answer has the token, which is shown once."""
    with ctx.database.transaction() as session:
        created, secret = operators.add(session, ctx.clock, ctx.actor.id, body.name, body.role)
        return operators.describe(created) | {"token": secret}


@router.delete("/operators/{name}")
def disable_operator(name: str, ctx: WriteAccess) -> dict[str, Any]:
    """End the operator's token and sessions."""
    with ctx.database.transaction() as session:
        return operators.describe(operators.disable(session, ctx.clock, ctx.actor.id, name))
