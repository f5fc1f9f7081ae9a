"""Rows of invoices, their lines, payments and credit notes, for the tenant's pages and the operator's."""

from typing import Any

from billing.invoicing.calculations import explained
from billing.invoicing.invoices import DRAFT, VOID
from billing.invoicing.open_amounts import open_minor
from billing.invoicing.tables import CreditNote, Invoice, InvoiceLine
from billing.payments.tables import Payment
from billing.periods import days, local_day
from billing.pricing.pricing import Component
from billing.pricing.tables import PriceVersionRow
from dashboards.formats import minor
from dashboards.page_data import Tile
from dashboards.tables import Column

INVOICES = [
    Column("invoice", "Invoice", link="href"),
    Column("period", "Period"),
    Column("state", "State", "badge"),
    Column("total", "Total", "minor", "Including tax, before credit."),
    Column("open", "To pay", "minor", "Total minus credit, payments and credit notes."),
    Column("due", "Due by", "figure"),
]
PAYMENTS = [
    Column("at", "Started", "moment"),
    Column("for", "For", link="href"),
    Column("by", "By"),
    Column("amount", "Amount", "minor"),
    Column("refunded", "Refunded", "minor"),
    Column("state", "State", "badge"),
    Column("settled", "Settled", "moment"),
    Column("failure", "Failure reason"),
]
LINES = [
    Column("description", "Line", link="href"),
    Column("project", "Project"),
    Column("quantity", "Quantity", "whole"),
    Column("unit", "Unit"),
    Column("unit_price", "Unit price"),
    Column("calculation", "Calculation"),
    Column("exact", "Exact", "exact", "Unrounded, as rated."),
    Column("amount", "Amount", "minor", "The exact amount, rounded once, half away from zero."),
]
NOTES = [
    Column("note", "Credit note", link="href"),
    Column("at", "Issued", "moment"),
    Column("reason", "Reason"),
    Column("net", "Net", "minor"),
    Column("tax", "Tax", "minor"),
    Column("outcome", "Outcome"),
]
COMPONENTS = frozenset(each.value for each in Component)


def invoice_row(each: Invoice, root: str) -> dict[str, Any]:
    return {
        "invoice": each.label or "Draft",
        "href": f"{root}/invoices/{each.id}",
        "period": days(each.period_start, each.period_end, each.timezone),
        "state": each.status,
        "total": each.total_minor,
        "open": open_minor(each),
        "due": local_day(each.due_at, each.timezone) if each.due_at else None,
        "currency": each.currency,
    }


def payment_row(each: Payment, labels: dict[str, str], root: str) -> dict[str, Any]:
    return {
        "at": each.created_at,
        "for": labels.get(each.invoice_id, each.invoice_id) if each.invoice_id else "top-up",
        "href": f"{root}/invoices/{each.invoice_id}" if each.invoice_id else "",
        "by": each.provider,
        "amount": each.amount_minor,
        "refunded": each.refunded_minor,
        "state": each.status,
        "settled": each.settled_at,
        "failure": each.failure,
        "currency": each.currency,
    }


def totals(invoice: Invoice) -> list[Tile]:
    """They add up: the first ones to the total, and all after it to what is to pay."""
    amounts = {
        "Subtotal": invoice.subtotal_minor,
        "Promotional credit": -invoice.promo_minor,
        "Tax": invoice.tax_minor,
        "Total": invoice.total_minor,
        "Prepaid credit": -invoice.prepaid_minor,
        "Paid": -invoice.paid_minor,
        "Credited": -invoice.credited_minor,
    }
    to_pay = invoice.due_minor if invoice.status == DRAFT else open_minor(invoice)
    unpaid = invoice.due_minor - invoice.paid_minor - invoice.credited_minor
    amounts["Voided" if invoice.status == VOID else "Written off"] = to_pay - unpaid
    amounts["To pay"] = to_pay
    always = ("Subtotal", "Tax", "Total", "To pay")
    return [
        Tile(words, minor(amount, invoice.currency))
        for words, amount in amounts.items()
        if amount or words in always
    ]


def line_row(
    each: InvoiceLine, projects: dict[str, str], path: str, versions: dict[str, PriceVersionRow]
) -> dict[str, Any]:
    unit_price, calculation = explained(each, versions)
    opens = each.kind in ("usage", "late_usage") and each.component in COMPONENTS
    return {
        "description": each.description,
        "href": f"{path}/lines/{each.position}" if opens else "",
        "project": projects.get(each.project_id, each.project_id),
        "quantity": each.quantity,
        "unit": each.unit,
        "unit_price": unit_price,
        "calculation": calculation,
        "exact": each.exact,
        "amount": each.amount_minor,
    }


def note_row(each: CreditNote, path: str) -> dict[str, Any]:
    return {
        "note": each.label,
        "href": f"{path}/credit-notes/{each.label}/pdf",
        "at": each.issued_at,
        "reason": each.reason,
        "net": each.net_minor,
        "tax": each.tax_minor,
        "outcome": each.outcome,
        "currency": each.currency,
    }
