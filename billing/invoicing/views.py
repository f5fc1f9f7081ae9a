"""Invoices and prices as JSON, for the API, the commands and the printed page."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts import references
from billing.accounts.tables import BillingAccount, Seller
from billing.amounts import minor, money
from billing.invoicing.calculations import explained, versions_of
from billing.invoicing.invoices import lines_of
from billing.invoicing.open_amounts import open_minor
from billing.invoicing.sellers import issuer
from billing.invoicing.tables import CreditNote, Invoice, InvoiceLine
from billing.periods import local_day
from billing.pricing.tables import PriceVersionRow
from core.money import format_minor, units_of_minor
from core.tenants.models import Project, Tenant


def invoice_json(session: Session, invoice: Invoice) -> dict[str, Any]:
    """The full invoice. `amount` is exact, in major units; `minor` is rounded, in minor units."""
    currency = invoice.currency
    lines = lines_of(session, invoice.id)
    projects = project_names(session, {line.project_id for line in lines})
    versions = versions_of(session, lines)
    shown = [_line(line, currency, projects, versions) for line in lines]
    return {
        "id": invoice.id,
        "number": invoice.label,
        "status": invoice.status,
        "tenant_id": invoice.tenant_id,
        "tenant": _tenant_name(session, invoice.tenant_id),
        "currency": currency,
        "period_start": invoice.period_start.isoformat(),
        "period_end": invoice.period_end.isoformat(),
        "timezone": invoice.timezone,
        "drafted_at": invoice.drafted_at.isoformat(),
        "final_at": invoice.final_at.isoformat() if invoice.final_at else None,
        "due_at": invoice.due_at.isoformat() if invoice.due_at else None,
        "seller": invoice.issued_by or issuer(session.get_one(Seller, invoice.seller_id)),
        "billed_to": _buyer(invoice) or _account(session, invoice.tenant_id),
        "lines": shown,
        "by_project": _by_project(lines, currency, projects),
        "usage": _usage(lines),
        "exact": money(invoice.exact, currency),
        "subtotal": minor(invoice.subtotal_minor, currency),
        "promotional_credit": minor(invoice.promo_minor, currency),
        "tax": minor(invoice.tax_minor, currency),
        "total": minor(invoice.total_minor, currency),
        "prepaid": minor(invoice.prepaid_minor, currency),
        "due": minor(invoice.due_minor, currency),
        "paid": minor(invoice.paid_minor, currency),
        "credited": minor(invoice.credited_minor, currency),
        "open": minor(open_minor(invoice), currency),
        "credit_notes": _credit_notes(session, invoice),
        "payment_reference": payment_reference(invoice),
    }


def invoice_summary(invoice: Invoice) -> dict[str, Any]:
    return {
        "id": invoice.id,
        "number": invoice.label or "draft",
        "tenant_id": invoice.tenant_id,
        "status": invoice.status,
        "period_start": local_day(invoice.period_start, invoice.timezone),
        "period_end": local_day(invoice.period_end, invoice.timezone),
        "total": format_minor(invoice.total_minor, invoice.currency),
        "open": format_minor(open_minor(invoice), invoice.currency),
        "currency": invoice.currency,
    }


def payment_reference(invoice: Invoice) -> str:
    """What a wire for it should state (ISO 11649); empty for a draft."""
    return references.of_invoice(invoice.label) if invoice.label else ""


def _line(
    line: InvoiceLine,
    currency: str,
    projects: dict[str, str],
    versions: dict[str, PriceVersionRow],
) -> dict[str, Any]:
    unit_price, calculation = explained(line, versions)
    return {
        "position": line.position,
        "kind": line.kind,
        "component": line.component,
        "description": line.description,
        "project_id": line.project_id,
        "project": projects.get(line.project_id, ""),
        "model": line.model,
        "adapter": line.adapter or None,
        "price_version": line.price_version or None,
        "quantity": line.quantity,
        "unit": line.unit,
        "unit_price": unit_price,
        "calculation": calculation,
        "exact": money(line.exact, currency),
        "billed": minor(line.amount_minor, currency),
        "rounding_units": str(units_of_minor(line.amount_minor, currency) - line.exact),
        "starts_at": line.starts_at.isoformat(),
        "ends_at": line.ends_at.isoformat(),
        "details": line.details,
    }


def _usage(lines: list[InvoiceLine]) -> dict[str, int]:
    """Token counts of the whole invoice, with the field names of the API's `usage`."""
    sums = dict.fromkeys(("input", "cached_input", "output", "waived"), 0)
    for line in lines:
        if line.kind in ("usage", "late_usage") and line.component in sums:
            sums[line.component] += line.quantity
    return {
        "prompt_tokens": sums["input"] + sums["cached_input"],
        "cached_tokens": sums["cached_input"],
        "completion_tokens": sums["output"],
        "waived_tokens": sums["waived"],
    }


def _by_project(
    lines: list[InvoiceLine], currency: str, projects: dict[str, str]
) -> list[dict[str, Any]]:
    exact: dict[str, int] = {}
    billed: dict[str, int] = {}
    for line in lines:
        if line.kind == "tax":
            continue
        exact[line.project_id] = exact.get(line.project_id, 0) + line.exact
        billed[line.project_id] = billed.get(line.project_id, 0) + line.amount_minor
    return [
        {
            "project_id": project_id,
            "project": projects.get(project_id, ""),
            "exact": money(exact[project_id], currency),
            "billed": minor(billed[project_id], currency),
        }
        for project_id in sorted(exact)
    ]


def project_names(session: Session, ids: set[str]) -> dict[str, str]:
    rows = session.execute(select(Project.id, Project.name).where(Project.id.in_(ids)))
    return {row[0]: row[1] for row in rows}


def _tenant_name(session: Session, tenant_id: str) -> str:
    tenant = session.get(Tenant, tenant_id)
    return tenant.name if tenant else tenant_id


def _buyer(invoice: Invoice) -> dict[str, Any]:
    """As of when it became final, without the names that are for exports alone."""
    kept = invoice.billed_to.items()
    return {name: value for name, value in kept if name not in ("account", "projects")}


def _account(session: Session, tenant_id: str) -> dict[str, Any]:
    account = session.get_one(BillingAccount, tenant_id)
    return {
        "name": account.legal_name,
        "address": account.address,
        "email": account.email,
        "tax_id": account.tax_id,
        "tax_region": account.tax_region,
        "tax_exempt": account.tax_exempt,
    }


def _credit_notes(session: Session, invoice: Invoice) -> list[dict[str, Any]]:
    notes = session.scalars(
        select(CreditNote).where(CreditNote.invoice_id == invoice.id).order_by(CreditNote.number)
    )
    return [credit_note_json(note) for note in notes]


def credit_note_json(note: CreditNote) -> dict[str, Any]:
    return {
        "id": note.id,
        "number": note.label,
        "net": minor(note.net_minor, note.currency),
        "tax": minor(note.tax_minor, note.currency),
        "total": minor(note.net_minor + note.tax_minor, note.currency),
        "outcome": note.outcome,
        "reason": note.reason,
        "issued_at": note.issued_at.isoformat(),
    }


def price_json(row: PriceVersionRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "tenant_id": row.tenant_id or None,
        "model": row.model,
        "adapter": row.adapter,
        "currency": row.currency,
        "effective_from": row.effective_from.isoformat(),
        "effective_to": row.effective_to.isoformat() if row.effective_to else None,
        "terms": row.terms,
        "note": row.note,
    }
