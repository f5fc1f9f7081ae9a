"""Converts an invoice to a provider's bill: a limited number of lines that sum to the amount due."""

from datetime import datetime
from itertools import groupby

from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.invoicing.invoices import lines_of
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.invoicing.views import project_names
from billing.payments.base import Bill, BillLine, Transfer
from billing.payments.methods import TRANSFER, euro_country

MAX_LINES = 240  # Stripe accepts 250


def bill_of(session: Session, invoice: Invoice) -> Bill:
    lines = lines_of(session, invoice.id)
    shown = _each(session, lines) if len(lines) <= MAX_LINES - 2 else _summed(lines)
    start, end = invoice.period_start, invoice.period_end
    account = session.get_one(BillingAccount, invoice.tenant_id)
    chosen = methods_of(account)
    for description, minor in (
        ("Promotional credit", -invoice.promo_minor),
        ("Paid from the prepaid balance", -invoice.prepaid_minor),
    ):
        if minor:
            shown.append((description, minor, start, end))
    return Bill(
        invoice.id,
        invoice.label or invoice.id,
        invoice.tenant_id,
        invoice.currency,
        invoice.due_minor,
        tuple(BillLine(position, *each) for position, each in enumerate(shown, 1)),
        chosen,
        transfer_of(account) if TRANSFER in chosen else None,
        max(1, (invoice.due_at - invoice.final_at).days)
        if invoice.due_at and invoice.final_at
        else 1,
        start,
    )


def methods_of(account: BillingAccount | None) -> tuple[str, ...]:
    """Of the tenant's setting; empty leaves the choice to the provider."""
    return tuple(account.payment_methods or ()) if account is not None else ()


def transfer_of(account: BillingAccount) -> Transfer:
    return Transfer(account.currency, euro_country(account.tax_region))


_Shown = tuple[str, int, datetime, datetime]


def _each(session: Session, lines: list[InvoiceLine]) -> list[_Shown]:
    names = project_names(session, {line.project_id for line in lines})
    shown = []
    for line in lines:
        where = names.get(line.project_id, "") if line.project_id else ""
        description = f"{line.description} ({where})" if where else line.description
        shown.append((description, line.amount_minor, line.starts_at, line.ends_at))
    return shown


def _summed(lines: list[InvoiceLine]) -> list[_Shown]:
    """One line per kind and model or, if those are too many, per kind."""

    def _grouped(model: bool) -> list[_Shown]:
        def _key(line: InvoiceLine) -> tuple[str, str]:
            return line.kind, line.model if model else ""

        shown = []
        for (kind, name), found in groupby(sorted(lines, key=_key), _key):
            each = list(found)
            description = " ".join(
                part for part in (kind.replace("_", " ").capitalize(), name) if part
            )
            minor = sum(line.amount_minor for line in each)
            start, end = min(x.starts_at for x in each), max(x.ends_at for x in each)
            shown.append((f"{description} ({len(each)} lines of our invoice)", minor, start, end))
        return shown

    by_model = _grouped(True)
    return by_model if len(by_model) <= MAX_LINES - 2 else _grouped(False)
