"""Invoices and payments of all tenants: search, states, open amounts by age, and an invoice with its
acts."""

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.adjustments.act_requests import Kind
from billing.invoicing import invoices
from billing.invoicing.calculations import versions_of
from billing.invoicing.open_amounts import open_minor
from billing.invoicing.tables import CreditNote
from billing.invoicing.views import project_names
from billing.payments.tables import Payment
from billing.periods import days, local_day
from billing.pricing.exchange_rates import Converter
from billing.reports import receivables
from core.money import format_minor
from core.tenants.models import Tenant
from dashboards.explorer import address
from dashboards.filters import choice
from dashboards.formats import minor
from dashboards.invoice_rows import (
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
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, root_of, wants_csv
from dashboards.pages.operator.exchange_rates import rates_tables, reporting_input
from dashboards.pages.operator.money_acts import acts_table, link, start
from dashboards.tables import Column, Table

BANK_LINES_PATH = "/operator/bank-lines"
PATH, PAYMENTS_PATH = "/operator/invoices", "/operator/payments"
_PAGE = 100
_BILLED = "Totals of all invoices that match, each at the rate of its own day."
_STATES = ("", "draft", "final", "paid", "void", "uncollectible")
_PAYMENT_STATES = ("", "pending", "succeeded", "failed")
_TENANT = Column("tenant", "Tenant", link="tenant_href")
_OF_ALL = [INVOICES[0], _TENANT, *INVOICES[1:]]
_PAYMENTS = [PAYMENTS[0], _TENANT, *PAYMENTS[1:4], Column("reference", "Reference"), *PAYMENTS[4:]]


def invoice_list(request: Request) -> Response:
    operator_of(request, "operations")
    deps, root = deps_of(request), root_of(request)
    now, search = deps.clock.now(), request.query_params.get("q", "")[:100]
    state = choice(request, "state", _STATES, "")
    bucket = choice(request, "age", ("", *receivables.BUCKETS), "")
    reporting = request.query_params.get("reporting", "")[:3].upper()
    with deps.database.read() as session:
        converter = None
        if reporting:
            first = receivables.first_day(session, now)
            converter = Converter.load(session, reporting, first, now.date())
        owed = receivables.ageing(session, now, converter)
        whole = []
        if converter is not None:
            total = receivables.billed(
                session, now, converter, search=search, state=state, bucket=bucket
            )
            whole = [Tile("Billed", minor(total, converter.currency), about=_BILLED)]
        found = receivables.invoices(
            session,
            now,
            search=search,
            state=state,
            bucket=bucket,
            before=request.query_params.get("before", "")[:40],
            limit=_PAGE,
        )
    rows = [
        invoice_row(each, root)
        | {"tenant": name, "tenant_href": f"{root}/operator/tenants/{each.tenant_id}"}
        | {"href": f"{root}{PATH}/{each.id}"}
        for each, name in found
    ]
    narrowed = bool(search or state or bucket)
    empty = "No invoice matches." if narrowed else "No invoice yet. Billing periods end with one."
    step = (PATH, "Show all") if narrowed else ("/operator/tenants", "See the tenants")
    table = Table(
        "Invoices, newest first", _OF_ALL, rows, totals=False, empty=empty, next_step=step
    )
    if wants_csv(request):
        return table.csv("invoices")
    inputs = [
        Input("q", "Number or tenant", value=search, required=False),
        _select("state", "State", state, _STATES),
        _select("age", "Past due", bucket, ("", *receivables.BUCKETS)),
        reporting_input(reporting),
    ]
    page_data = PageData(
        "Invoices of all tenants",
        "Open amounts by days past due, and every invoice. Each opens to its acts.",
        tiles=[*whole, *(tile for line in owed for tile in _ages(line, root, reporting))],
        actions=[Form(PATH, "Search", inputs=inputs, method="get")],
        tables=[table, *rates_tables(converter)],
        link=(f"{PATH}?{urlencode(_kept(request) | {'format': 'csv'})}", "Download CSV"),
        pager=_older(request, found[-1][0].id if len(found) == _PAGE else ""),
    )
    return show(request, page_data)


def _ages(line: dict[str, Any], root: str, reporting: str) -> list[Tile]:
    currency, kept = line["currency"], {"reporting": reporting} if reporting else {}
    named = {"To pay": ("total", "")} | {name: (name, name) for name in receivables.BUCKETS}
    return [
        Tile(
            title[0].upper() + title[1:],
            minor(line[key], currency),
            state="bad" if line[key] and key.endswith("days") else "",
            href=f"{root}{PATH}?{urlencode({'age': age} | kept)}" if age else "",
        )
        for title, (key, age) in named.items()
    ]


def payment_list(request: Request) -> Response:
    operator_of(request, "operations")
    deps, root = deps_of(request), root_of(request)
    search = request.query_params.get("q", "")[:100]
    state = choice(request, "state", _PAYMENT_STATES, "")
    with deps.database.read() as session:
        found = receivables.payments(
            session,
            search=search,
            state=state,
            before=request.query_params.get("before", "")[:40],
            limit=_PAGE,
        )
    rows = [
        payment_row(each, {each.invoice_id or "": label or "draft"}, root)
        | {
            "tenant": name,
            "tenant_href": f"{root}/operator/tenants/{each.tenant_id}",
            "reference": each.reference,
            "href": f"{root}{PATH}/{each.invoice_id}" if each.invoice_id else "",
        }
        for each, name, label in found
    ]
    narrowed = bool(search or state)
    empty = "No payment matches." if narrowed else "No payment yet. Wires come with a statement."
    step = (PAYMENTS_PATH, "Show all") if narrowed else (BANK_LINES_PATH, "Import a statement")
    table = Table(
        "Payments, newest first", _PAYMENTS, rows, totals=False, empty=empty, next_step=step
    )
    if wants_csv(request):
        return table.csv("payments")
    for row, (each, _, _) in zip(rows, found, strict=True):
        row["acts"] = [start(Kind.REFUND, each.id, "Refund…")] if _refundable(each) else []
    table = replace(table, columns=[*_PAYMENTS, Column("acts", "Change", "acts")])
    inputs = [
        Input("q", "Reference, number or tenant", value=search, required=False),
        _select("state", "State", state, _PAYMENT_STATES),
    ]
    page_data = PageData(
        "Payments of all tenants",
        "Received, pending and failed. A wire is booked on its invoice, or on the tenant's page.",
        actions=[Form(PAYMENTS_PATH, "Search", inputs=inputs, method="get")],
        tables=[table],
        link=(f"{PAYMENTS_PATH}?{urlencode(_kept(request) | {'format': 'csv'})}", "Download CSV"),
        pager=_older(request, found[-1][0].id if len(found) == _PAGE else ""),
    )
    return show(request, page_data)


def invoice_page(request: Request) -> Response:
    operator_of(request, "operations")
    deps, root = deps_of(request), root_of(request)
    with deps.database.read() as session:
        invoice = invoices.get(session, request.path_params["invoice_id"])
        tenant = session.get(Tenant, invoice.tenant_id)
        lines = invoices.lines_of(session, invoice.id)
        paid = session.scalars(select(Payment).where(Payment.invoice_id == invoice.id)).all()
        notes = session.scalars(select(CreditNote).where(CreditNote.invoice_id == invoice.id)).all()
        acts = acts_table(session, invoice.id, root)
        versions = versions_of(session, lines)
        projects = project_names(session, {each.project_id for each in lines})
    name = tenant.name if tenant else invoice.tenant_id
    label, path = invoice.label or "draft", f"{root}/invoices/{invoice.id}"
    columns = [*PAYMENTS, Column("acts", "Change", "acts")]
    rows = [
        payment_row(each, {invoice.id: label}, root)
        | {"acts": [start(Kind.REFUND, each.id, "Refund…")] if _refundable(each) else []}
        for each in paid
    ]
    line_rows = [line_row(each, projects, path, versions) | {"href": ""} for each in lines]
    page_data = PageData(
        f"Invoice {label}",
        f"{name} · {days(invoice.period_start, invoice.period_end, invoice.timezone)} · {invoice.status}"
        + (f" · due {local_day(invoice.due_at, invoice.timezone)}" if invoice.due_at else ""),
        tiles=totals(invoice),
        links=_acts(invoice),
        tables=[
            Table("Lines", LINES, line_rows, invoice.currency, totals=False),
            Table("Payments", columns, rows, totals=False, empty="None yet."),
        ],
        after=[Table("Credit notes", NOTES, [note_row(n, path) for n in notes], totals=False)]
        * bool(notes)
        + [acts],
        back=(PATH, "All invoices"),
        link=(f"/operator/tenants/{invoice.tenant_id}", f"Tenant {name}"),
    )
    return show(request, page_data)


def _refundable(payment: Payment) -> bool:
    return payment.status == "succeeded" and payment.refunded_minor < payment.amount_minor


def _acts(invoice: Any) -> list[tuple[str, str]]:
    """The acts that the invoice's state allows."""
    left = open_minor(invoice)
    amount = format_minor(left, invoice.currency)
    touched = invoice.paid_minor or invoice.credited_minor
    allowed = {
        Kind.WIRE: (invoice.status == "final" and left > 0, "Book a wire…", amount),
        Kind.CREDIT_NOTE: (invoice.status in ("final", "paid"), "Credit note…", ""),
        Kind.WRITE_OFF: (invoice.status == "final" and left > 0, "Write off…", ""),
        Kind.VOID: (invoice.status in ("final", "paid") and not touched, "Void…", ""),
    }
    return [
        link(kind, invoice.id, words, usual) for kind, (can, words, usual) in allowed.items() if can
    ]


def _select(name: str, label: str, value: str, options: tuple[str, ...]) -> Input:
    shown = [(each, each or "any") for each in options]
    return Input(name, label, "select", value, shown, required=False)


def _kept(request: Request) -> dict[str, str]:
    return {name: request.query_params.get(name, "") for name in ("q", "state", "age", "reporting")}


def _older(request: Request, last: str) -> list[tuple[str, str]]:
    return [("Older", address(request, before=last))] if last else []


ROUTES = [
    Route(PATH, invoice_list),
    Route(PAYMENTS_PATH, payment_list),
    Route(f"{PATH}/{{invoice_id}}", invoice_page),
]
