"""Invoices and payments: the list, an invoice with its lines, the usage of a line, the PDF."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.accounts.references import printed
from billing.invoicing import credit_notes
from billing.invoicing.calculations import versions_of
from billing.invoicing.invoices import FINAL, lines_of
from billing.invoicing.open_amounts import open_minor
from billing.invoicing.printing import as_pdf, credit_note_page
from billing.invoicing.printing import invoice_page as printed_invoice
from billing.invoicing.tables import CreditNote, Invoice, InvoiceLine
from billing.invoicing.views import payment_reference
from billing.ledger.tables import CreditGrant
from billing.payments.tables import Payment
from billing.periods import days
from billing.pricing.component_columns import amount_of, count_of
from billing.pricing.prices import get_version
from billing.pricing.pricing import PRICED_AS, Component, priced_as
from billing.usage.tables import DailyUsage
from core.errors import NotFound
from core.tenants.models import ApiKey, Project
from dashboards.formats import minor, money
from dashboards.invoice_rows import (
    COMPONENTS,
    INVOICES,
    LINES,
    NOTES,
    PAYMENTS,
    invoice_row,
    line_row,
    note_row,
    payment_row,
    totals,
)
from dashboards.page_data import PageData, Tile, show
from dashboards.pages.common import deps_of, root_of, viewer_of, wants_csv
from dashboards.tables import Column, Table
from dashboards.viewer import Viewer

LINE_USAGE = [
    Column("day", "Day", "figure"),
    Column("key", "Key"),
    Column("requests", "Requests", "whole"),
    Column("quantity", "Quantity", "whole"),
    Column("amount", "Exact", "exact", "Unrounded, as rated."),
]


def invoice_list(request: Request) -> Response:
    viewer, deps = viewer_of(request, "invoices"), deps_of(request)
    tenant_id, now, root = viewer.scope.tenant_id, deps.clock.now(), root_of(request)
    with deps.database.read() as session:
        found = session.scalars(
            select(Invoice)
            .where(Invoice.tenant_id == tenant_id)
            .order_by(Invoice.period_start.desc())
            .limit(120)
        ).all()
        paid = session.scalars(
            select(Payment)
            .where(Payment.tenant_id == tenant_id)
            .order_by(Payment.created_at.desc())
            .limit(120)
        ).all()
        credit = _credit(session, tenant_id, viewer.currency, now)
    rows = [invoice_row(each, root) for each in found]
    empty = "None yet. The first draft appears when the billing period ends."
    step = ("/costs", "See the costs so far")
    table = Table(
        "Invoices, newest first", INVOICES, rows, totals=False, empty=empty, next_step=step
    )
    if wants_csv(request):
        return table.csv("invoices")
    labels = {each.id: each.label or "draft" for each in found}
    payments = [payment_row(each, labels, root) for each in paid]
    none = "None yet. A payment appears when an invoice is collected or credit is topped up."
    page_data = PageData(
        "Invoices and payments",
        "A draft is finalised after the grace period for late usage. A final invoice never changes.",
        tiles=_tiles(viewer, list(found), credit, now),
        tables=[table, Table("Payments", PAYMENTS, payments, totals=False, empty=none)],
        link=("/payment-methods", "How invoices are paid"),
    )
    return show(request, page_data)


def _credit(session: Session, tenant_id: str, currency: str, now: datetime) -> int:
    """Picounits remaining on grants that have not expired."""
    query = select(func.coalesce(func.sum(CreditGrant.remaining), 0)).where(
        CreditGrant.tenant_id == tenant_id,
        CreditGrant.currency == currency,
        CreditGrant.expires_at.is_(None) | (CreditGrant.expires_at > now),
    )
    return int(session.scalar(query) or 0)


def _tiles(viewer: Viewer, found: list[Invoice], credit: int, now: datetime) -> list[Tile]:
    own = [each for each in found if each.currency == viewer.currency]
    late = [each for each in own if each.due_at and each.due_at < now and open_minor(each)]
    owed, overdue = (sum(map(open_minor, each)) for each in (own, late))
    paid = sum(each.paid_minor for each in own)
    return [
        Tile("To pay", minor(owed, viewer.currency)),
        Tile("Overdue", minor(overdue, viewer.currency), state="bad" if overdue else ""),
        Tile("Paid", minor(paid, viewer.currency), about="By payments, without credit."),
        Tile(
            "Credit left",
            money(credit, viewer.currency),
            about="Prepaid and promotional credit that has not expired.",
        ),
    ]


def invoice_page(request: Request) -> Response:
    viewer, deps = viewer_of(request, "invoices"), deps_of(request)
    root = root_of(request)
    with deps.database.read() as session:
        invoice = _own_invoice(session, viewer, request.path_params["invoice_id"])
        lines = lines_of(session, invoice.id)
        versions = versions_of(session, lines)
        named = session.execute(
            select(Project.id, Project.name).where(Project.tenant_id == viewer.scope.tenant_id)
        )
        projects = {row[0]: row[1] for row in named}
        paid = session.scalars(select(Payment).where(Payment.invoice_id == invoice.id)).all()
        notes = session.scalars(select(CreditNote).where(CreditNote.invoice_id == invoice.id)).all()
    path = f"{root}/invoices/{invoice.id}"
    rows = [line_row(each, projects, path, versions) for each in lines]
    table = Table("Lines", LINES, rows, invoice.currency, totals=False)
    if wants_csv(request):
        return table.csv(f"invoice-{invoice.label or 'draft'}")
    labels = {invoice.id: invoice.label or "draft"}
    payments = [payment_row(each, labels, root) for each in paid]
    tables = [table, Table("Payments", PAYMENTS, payments, totals=False, empty="None yet.")]
    if notes:
        tables.append(
            Table("Credit notes", NOTES, [note_row(each, path) for each in notes], totals=False)
        )
    page_data = PageData(
        f"Invoice {invoice.label or '(draft)'}",
        f"{days(invoice.period_start, invoice.period_end, invoice.timezone)} · {invoice.status}. "
        "Select a line to see its usage.",
        tiles=totals(invoice),
        tables=tables,
        back=("/invoices", "All invoices"),
        link=(f"/invoices/{invoice.id}/pdf", "Download PDF"),
        away=(invoice.pay_page, "Pay this invoice") if _to_pay(invoice) else None,
        remarks=[_by_wire(invoice)] if invoice.status == FINAL and open_minor(invoice) > 0 else [],
    )
    return show(request, page_data)


def _by_wire(invoice: Invoice) -> str:
    bank = " · ".join(invoice.issued_by.get("bank_details", "").split("\n"))
    reference = printed(payment_reference(invoice))
    return f"By wire, state the reference {reference}. {bank}".strip()


def _to_pay(invoice: Invoice) -> bool:
    return bool(invoice.pay_page) and invoice.status == FINAL and open_minor(invoice) > 0


def line_usage(request: Request) -> Response:
    """The usage of an invoice line by day and key. The amounts add up to the line."""
    viewer, deps = viewer_of(request, "invoices"), deps_of(request)
    position = request.path_params["position"]
    with deps.database.read() as session:
        invoice = _own_invoice(session, viewer, request.path_params["invoice_id"])
        line = session.scalar(
            select(InvoiceLine).where(
                InvoiceLine.invoice_id == invoice.id, InvoiceLine.position == position
            )
        )
        if line is None or line.component not in COMPONENTS:
            raise NotFound(
                "This line has no usage.", next_step="Choose a usage line of the invoice."
            )
        rows = _line_usage(session, invoice, line)
    table = Table("By day and key", LINE_USAGE, rows, invoice.currency)
    if wants_csv(request):
        return table.csv(f"invoice-{invoice.label or 'draft'}-line-{position}")
    exact = sum(row["amount"] for row in rows)
    agrees = exact == line.exact
    page_data = PageData(
        line.description,
        f"Line {position} of invoice {invoice.label or '(draft)'}, as rated, before rounding.",
        tiles=[
            Tile("Billed", minor(line.amount_minor, invoice.currency)),
            Tile(
                "Sum of the usage below",
                money(exact, invoice.currency),
                "equals the line" if agrees else "differs from the line",
                state="good" if agrees else "bad",
            ),
        ],
        tables=[table],
        back=(f"/invoices/{invoice.id}", "Back to the invoice"),
    )
    return show(request, page_data)


def _line_usage(session: Session, invoice: Invoice, line: InvoiceLine) -> list[dict[str, Any]]:
    table = DailyUsage
    component = Component(line.component)
    rates = get_version(session, line.price_version).rates
    # The parts that this version has no rate of their own for are in the line of what prices them.
    counts = [
        count_of(each, table)
        for each in Component
        if each is component or (each in PRICED_AS and priced_as(rates, each) is component)
    ]
    quantity, amount = sum(counts[1:], counts[0]), amount_of(component, table)
    found = session.execute(
        select(
            table.at, table.key_id, func.sum(table.requests), func.sum(quantity), func.sum(amount)
        )
        .where(
            table.tenant_id == invoice.tenant_id,
            table.bill_period_id == invoice.period_id,
            table.usage_period_id == line.usage_period_id,
            table.project_id == line.project_id,
            table.model == line.model,
            table.adapter == line.adapter,
            table.price_version == line.price_version,
        )
        .group_by(table.at, table.key_id)
        .order_by(table.at, table.key_id)
    ).all()
    ids = {row[1] for row in found}
    named = session.execute(select(ApiKey.id, ApiKey.name).where(ApiKey.id.in_(ids)))
    names = {row[0]: row[1] for row in named}
    return [
        {
            "day": f"{row[0].astimezone(UTC):%Y-%m-%d}",
            "key": names.get(row[1], row[1]),
            "requests": int(row[2]),
            "quantity": int(row[3]),
            "amount": int(row[4]),
        }
        for row in found
        if row[3] or row[4]
    ]


def pdf(request: Request) -> Response:
    viewer, deps = viewer_of(request, "invoices"), deps_of(request)
    with deps.database.read() as session:
        invoice = _own_invoice(session, viewer, request.path_params["invoice_id"])
        printed = printed_invoice(session, invoice)
    return _as_pdf(printed, f"invoice-{invoice.label or 'draft'}.pdf")


def note_pdf(request: Request) -> Response:
    viewer, deps = viewer_of(request, "invoices"), deps_of(request)
    with deps.database.read() as session:
        invoice = _own_invoice(session, viewer, request.path_params["invoice_id"])
        note = credit_notes.get(session, request.path_params["label"])
        if note.invoice_id != invoice.id:
            raise credit_notes.unknown(note.label)
        printed = credit_note_page(session, note)
    return _as_pdf(printed, f"credit-note-{note.label}.pdf")


def _as_pdf(page: str, name: str) -> Response:
    return Response(
        as_pdf(page),
        media_type="application/pdf",
        headers={"content-disposition": f'inline; filename="{name}"'},
    )


def _own_invoice(session: Session, viewer: Viewer, invoice_id: str) -> Invoice:
    found = session.get(Invoice, invoice_id)
    if found is None or found.tenant_id != viewer.scope.tenant_id:
        raise NotFound(
            f"There is no invoice {invoice_id[:80]!r}.", next_step="Choose one from the list."
        )
    return found


ROUTES = [
    Route("/invoices", invoice_list),
    Route("/invoices/{invoice_id}", invoice_page),
    Route("/invoices/{invoice_id}/pdf", pdf),
    Route("/invoices/{invoice_id}/credit-notes/{label}/pdf", note_pdf),
    Route("/invoices/{invoice_id}/lines/{position:int}", line_usage),
]
