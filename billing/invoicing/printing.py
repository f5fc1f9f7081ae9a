"""Printable invoices and credit notes: HTML templates, rendered to PDF by WeasyPrint."""

from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from sqlalchemy.orm import Session

from billing.accounts import references
from billing.accounts.tables import Seller
from billing.invoicing.sellers import logo_uri
from billing.invoicing.tables import CreditNote, Invoice
from billing.invoicing.views import credit_note_json, invoice_json
from billing.periods import zone_of
from core.errors import MissingExtra
from core.extras import imports_of


def invoice_page(session: Session, invoice: Invoice) -> str:
    return as_html(invoice_json(session, invoice), _logo(session, invoice))


def credit_note_page(session: Session, note: CreditNote) -> str:
    invoice = session.get_one(Invoice, note.invoice_id)
    document, shown = invoice_json(session, invoice), credit_note_json(note)
    return _render("credit_note.html", document, _logo(session, invoice), note=shown)


def as_html(document: dict[str, Any], logo: str = "") -> str:
    """A self-contained page: no scripts, no external resources."""
    return _render("invoice.html", document, logo)


def as_pdf(page: str) -> bytes:
    # Imported here: it is heavy, loads system libraries, and few processes print.
    with imports_of("pdf", "An invoice as PDF"):
        try:
            from weasyprint import HTML
        except OSError as error:
            raise MissingExtra(
                f"WeasyPrint cannot load a system library: {error}".partition("\n")[0],
                next_step="Install Pango (Debian: libpango-1.0-0 and libpangoft2-1.0-0).",
            ) from None

    return bytes(HTML(string=page, base_url=".").write_pdf())


def _render(template: str, document: dict[str, Any], logo: str, **more: Any) -> str:
    day = _day_in(document["timezone"])
    return _template(template).render(
        invoice=document, logo=logo, day=day, less=_less, printed=references.printed, **more
    )


def _logo(session: Session, invoice: Invoice) -> str:
    return logo_uri(session.get_one(Seller, invoice.seller_id))


def _less(text: str) -> str:
    """An amount that is deducted, with its sign."""
    return text[1:] if text.startswith("-") else f"−{text}"


def _day_in(timezone: str) -> Any:
    zone = zone_of(timezone)

    def _day(moment: str | None) -> str:
        if not moment:
            return "–"
        return f"{datetime.fromisoformat(moment).astimezone(zone):%Y-%m-%d}"

    return _day


@lru_cache(maxsize=4)
def _template(name: str) -> Template:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(name)
