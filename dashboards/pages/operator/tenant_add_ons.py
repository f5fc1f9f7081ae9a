"""A tenant's add-ons: the table and the form on its billing page."""

from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.adjustments.money_acts import FourEyes
from billing.subscriptions import add_ons
from core.errors import BadRequest
from core.ids import new_id
from core.tenants import organisations
from core.tenants.models import Tenant
from dashboards.page_data import Form, Input
from dashboards.pages.common import (
    Fields,
    deps_of,
    operator_of,
    redirect_with_notice,
)
from dashboards.tables import Column, Table

_COLUMNS = [
    Column("add_on", "Add-on"),
    Column("quantity", "Units", "whole"),
    Column("fee", "Fee", "money", "Of all units, per interval."),
    Column("interval", "Interval"),
    Column("first", "From"),
    Column("last", "To"),
]


def table(session: Session, tenant_id: str, currency: str) -> Table:
    rows = [
        each
        | {
            "fee": int(each["fee"]["units"]),
            "first": each["from"][:10],
            "last": each["to"][:10] if each["to"] else None,
        }
        for each in add_ons.of_tenant(session, tenant_id)
    ]
    return Table("Add-ons", _COLUMNS, rows, currency, totals=False, empty="No add-on.")


def forms(session: Session, path: str) -> list[Form]:
    known = [(each.name, each.name) for each in add_ons.listed(session)]
    if not known:
        return []
    inputs = [
        Input("add_on", "Add-on", "select", known[0][0], known),
        Input("quantity", "Units", "number", "1", hint="0 removes it"),
    ]
    return [Form(path, "Set", inputs=inputs, act="add_on", title="Add-ons")]


def change(request: Request, form_fields: Fields, path: str) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    written, name = form_fields.get("quantity", ""), form_fields.get("add_on", "")
    if not (written.isascii() and written.isdecimal()) or int(written) > add_ons.MOST:
        raise BadRequest(f"{written[:20]!r} is not a number of units.", param="quantity")
    terms = {"add_on": name, "quantity": int(written)}
    rule = FourEyes.of(deps.four_eyes_above)
    with deps.database.transaction() as session:
        tenant: Tenant = organisations.tenant_named(session, request.path_params["tenant_id"])
        asked = ActRequest(Kind.ADD_ON, tenant.id, new_id("addon"), terms=terms)
        act = money_acts.submit(session, deps.clock, asked, viewer.scope.actor, rule)
        notice = "add-on-set" if act.status == money_acts.POSTED else "act-waits"
    return redirect_with_notice(request, path.format(tenant_id=tenant.id), notice)
