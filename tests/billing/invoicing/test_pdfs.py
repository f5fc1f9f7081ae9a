"""Invoices and credit notes as PDF, read back by pypdf: what is printed where, how large and how bold."""

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pytest
from sqlalchemy import text

from billing.invoicing import credit_notes, invoices
from billing.invoicing.printing import as_pdf, credit_note_page, invoice_page
from billing.invoicing.views import invoice_json
from billing.taxes.tax_rates import add_rate
from core.money import units_of
from tests.billing.conftest import Deployment
from tests.billing.invoicing.test_sellers import finals, note_on
from tests.billing.subscriptions.test_plans import plan, subscribe

pypdf = pytest.importorskip("pypdf")
pytest.importorskip("weasyprint")


@dataclass(frozen=True)
class Run:
    """A line of text in one font; its baseline in points from the page's lower edge."""

    text: str
    y: float
    size: float
    bold: bool


def runs_of(pdf: bytes) -> list[Run]:
    found: list[Run] = []

    def _heard(said: str, page: Any, run: Any, font: Any, size: float) -> None:
        if not said.strip() or font is None:
            return
        # The run's matrix in that of the page; both scale and move, and neither turns.
        scale = abs(run[3] * page[3])
        bold = "Bold" in str(font["/BaseFont"])
        found.append(Run(said.strip(), run[5] * page[3] + page[5], size * scale, bold))

    for page in pypdf.PdfReader(BytesIO(pdf)).pages:
        page.extract_text(visitor_text=_heard)
    return found


def one(runs: list[Run], text: str) -> Run:
    """A row of sums: its label and its amount are one run, as they have one font."""
    found = [each for each in runs if each.text == text]
    assert len(found) == 1, [each.text for each in runs]
    return found[0]


@pytest.fixture
def taxed(lite: Deployment) -> str:
    """The id of a final invoice of 100.00 and 19.00 of tax, of which 5.00 and 0.95 are credited."""
    with lite.database.transaction() as session:
        add_rate(session, "DE", "VAT", 190_000, lite.clock.now())
        session.execute(text("update billing_accounts set tax_region = 'DE'"))
    plan(lite, base_fee=units_of("100"))
    subscribe(lite, "pro")
    lite.clock.advance(days=32)
    (invoice_id, *_) = finals(lite, 2)
    note_on(lite, invoice_id, 500, 1)
    return invoice_id


def test_the_totals_of_an_invoice_look_like_totals(lite: Deployment, taxed: str) -> None:
    with lite.database.read() as session:
        runs = runs_of(as_pdf(invoice_page(session, invoices.get(session, taxed))))
    rows = ("Subtotal 100.00", "VAT (19 %) 19.00", "Total 119.00 USD", "Credit notes −5.95")
    subtotal, tax, total, credited = (one(runs, text) for text in rows)
    due = one(runs, "Amount due 113.05 USD")
    plain, heavy = (subtotal, tax, credited), (total, due)
    assert not any(each.bold for each in plain) and all(each.bold for each in heavy)
    assert due.size > total.size == subtotal.size
    heights = [each.y for each in (subtotal, tax, total, credited, due)]
    assert heights == sorted(heights, reverse=True), "one below the other"
    (fee,) = [each for each in runs if each.text.endswith("100 100.00")]
    assert fee.y > subtotal.y and not fee.bold, "after the lines"


def test_a_credit_note_is_a_document_of_its_own(lite: Deployment, taxed: str) -> None:
    note = note_on(lite, taxed, 300, 2)
    with lite.database.read() as session:
        page = credit_note_page(session, credit_notes.get(session, note.label))
        invoice = invoices.get(session, taxed).label
    runs = runs_of(as_pdf(page))
    assert one(runs, f"Credit note {note.label}").size > 15
    assert any(each.text.startswith(f"Invoice {invoice}") for each in runs) or invoice in str(runs)
    net, tax = one(runs, "Net amount 3.00"), one(runs, "Tax 0.57")
    total = one(runs, "Total credited 3.57 USD")
    assert total.bold and not net.bold and not tax.bold
    assert total.size > net.size and net.y > tax.y > total.y


def test_an_invoice_says_who_bills_and_who_is_billed(lite: Deployment, taxed: str) -> None:
    with lite.database.read() as session:
        invoice = invoices.get(session, taxed)
        names = [invoice_json(session, invoice)[who]["name"] for who in ("seller", "billed_to")]
        runs = [each.text for each in runs_of(as_pdf(invoice_page(session, invoice)))]
    assert [runs[runs.index(label) + 1] for label in ("From", "Bill to")] == names
