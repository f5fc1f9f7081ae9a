"""The choice of an act on money and what it concerns, where a page was opened without them."""

from urllib.parse import urlencode

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from billing.adjustments.act_requests import Kind
from billing.invoicing.tables import Invoice
from core.errors import NotFound
from core.tenants.models import Tenant
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import deps_of, root_of

# An add-on is set on a tenant's billing page, a refund at its payment, an undo at the act.
_OF_TENANTS = (Kind.GRANT, Kind.WIRE, Kind.PLAN, Kind.TAX, Kind.ADDRESS)
_CHOSEN = (*_OF_TENANTS, Kind.CREDIT_NOTE, Kind.VOID, Kind.WRITE_OFF)


def choice_page(request: Request, path: str, back: str, titles: dict[Kind, str]) -> Response:
    """The acts to choose from; with `of` (a tenant's name or an invoice's number), the act's form."""
    asked = request.query_params
    name, of = asked.get("kind", ""), asked.get("of", "").strip()
    known = name in list(_CHOSEN)
    problem = f"There is no act {name[:40]!r}. Choose one below." if name and not known else ""
    if known and of:
        try:
            with deps_of(request).database.read() as session:
                target = _target(session, Kind(name), of)
        except NotFound as error:
            problem = str(error)
        else:
            address = f"{root_of(request)}{path}?{urlencode({'kind': name, 'target': target})}"
            return RedirectResponse(address, 303)
    options = [(kind.value, titles[kind]) for kind in _CHOSEN]
    inputs = [
        Input("kind", "Act", "select", name if known else Kind.GRANT.value, options),
        Input("of", "Tenant or invoice", value=of, hint="a tenant's name, an invoice's number"),
    ]
    page_data = PageData(
        "New act on money",
        "A preview of its postings follows. Refunds start on All payments, add-ons on a tenant's billing "
        "page, and an undo next to the adjustment.",
        actions=[Form(path, "Continue", {}, inputs, method="get", problem=problem, wrong="of")],
        back=(back, "Acts on money"),
    )
    return show(request, page_data, 400 if problem else 200)


def _target(session: Session, kind: Kind, of: str) -> str:
    """The id of a tenant or of an invoice. NotFound."""
    table, label = (Tenant, Tenant.name) if kind in _OF_TENANTS else (Invoice, Invoice.label)
    found = session.scalar(select(table.id).where((label == of) | (table.id == of)))
    if found is None:
        noun, page = ("tenant", "Tenants") if table is Tenant else ("invoice", "All invoices")
        raise NotFound(f"There is no {noun} {of[:80]!r}.", next_step=f"{page} lists them.")
    return found
