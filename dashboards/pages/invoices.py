"""Invoices: the list, one invoice with its lines, and the usage behind a line."""

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.models import Invoice, InvoiceLine
from core.errors import NotFound
from dashboards.pages.common import house_of, viewer_of
from dashboards.render import page


def listing(request: Request) -> Response:
    viewer, house = viewer_of(request, "invoices"), house_of(request)
    with house.database.read() as session:
        found = session.scalars(
            select(Invoice)
            .where(Invoice.tenant_id == viewer.scope.tenant_id)
            .order_by(Invoice.period_start.desc())
            .limit(120)
        ).all()
    return page(request, "invoices.html", invoices=found)


def one(request: Request) -> Response:
    viewer, house = viewer_of(request, "invoices"), house_of(request)
    with house.database.read() as session:
        invoice = session.get(Invoice, request.path_params["invoice_id"])
        if invoice is None or invoice.tenant_id != viewer.scope.tenant_id:
            raise NotFound("There is no such invoice.", next_step="Look in the list.")
        lines = session.scalars(
            select(InvoiceLine)
            .where(InvoiceLine.invoice_id == invoice.id)
            .order_by(InvoiceLine.position)
        ).all()
    return page(request, "invoice.html", invoice=invoice, lines=lines)


ROUTES = [Route("/invoices", listing), Route("/invoices/{invoice_id}", one)]
