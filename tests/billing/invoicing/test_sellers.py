"""The seller's profile on invoices, credit notes and their PDFs; how notes are rounded."""

import struct
import zlib
from typing import Any

import pytest
from sqlalchemy import text

from billing.invoicing import credit_notes, invoice_run, invoices, sellers
from billing.invoicing.printing import as_pdf, credit_note_page, invoice_page
from billing.invoicing.tables import CreditNote
from billing.invoicing.views import invoice_json
from billing.ledger import credits
from billing.taxes.tax_rates import add_rate
from core.errors import BadRequest, Conflict
from core.money import Money, units_of
from tests.billing.conftest import Deployment
from tests.billing.subscriptions.test_plans import plan, subscribe

PROFILE = {
    "name": "Example AI GmbH",
    "address": "Hafenstr. 1\n20457 Hamburg",
    "tax_region": "de",
    "tax_id": "DE 136 695 976",
    "bank_details": "IBAN DE02120300000000202051",
    "footer": "Registered in Hamburg, HRB 1",
    "number_prefix": "EX",
    "next_number": 1001,
}


def png() -> bytes:
    """One red pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\x00\xff\x00\x00")
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def change(deployment: Deployment, **changes: Any) -> None:
    with deployment.database.transaction() as session:
        sellers.change(session, changes)


def finals(deployment: Deployment, days: int = 40) -> list[str]:
    deployment.clock.advance(days=days)
    return invoice_run.run(deployment.database, deployment.clock).finalised


def test_an_invoice_states_the_profile_and_keeps_it(deployment: Deployment) -> None:
    change(deployment, **PROFILE, logo=png())
    deployment.record(deployment.event(output_tokens=1_000_000))
    (final,) = finals(deployment)
    with deployment.database.read() as session:
        invoice = invoices.get(session, final)
        page, document = invoice_page(session, invoice), invoice_json(session, invoice)
    assert document["number"] == "EX-001001"
    assert document["seller"]["tax_id"] == "DE136695976"
    for stated in (
        "Example AI GmbH",
        "20457 Hamburg",
        "DE136695976",
        "IBAN DE02120300000000202051",
        "HRB 1",
        'src="data:image/png;base64,',
    ):
        assert stated in page, stated
    assert as_pdf(page).startswith(b"%PDF-")
    change(deployment, name="Another AG", bank_details="", footer="")
    with deployment.database.read() as session:
        invoice = invoices.get(session, final)
        assert invoice_json(session, invoice)["seller"] == document["seller"]
        assert "Another AG" not in invoice_page(session, invoice)


def test_numbers_start_where_the_seller_says_and_then_run_on(lite: Deployment) -> None:
    change(lite, next_number=500)
    lite.record(lite.event())
    (first,) = finals(lite)
    with lite.database.read() as session:
        assert invoices.get(session, first).label == "TH-000500"
    with pytest.raises(Conflict, match=r"last one is 500"):
        change(lite, next_number=900)
    change(lite, next_number=501, number_prefix="NEW")
    lite.record(lite.event())
    (second,) = finals(lite)
    with lite.database.read() as session:
        assert invoices.get(session, second).label == "NEW-000501"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": "  "}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"footer": "x" * 1001}, "footer"),
        ({"tax_region": "Germany"}, "tax_region"),
        ({"tax_region": "DE", "tax_id": "DE123"}, "tax_id"),
        ({"tax_id": "DE136695976"}, "tax_id"),
        ({"number_prefix": "A/B"}, "number_prefix"),
        ({"next_number": 0}, "next_number"),
        ({"next_number": 10**12}, "next_number"),
        ({"next_number": "ten"}, "next_number"),
        ({"logo": b"GIF89a"}, "logo"),
        ({"logo": b"\x89PNG\r\n\x1a\n" + bytes(2**18)}, "logo"),
    ],
)
def test_what_an_invoice_could_not_state_is_refused(
    lite: Deployment, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        change(lite, **changes)
    assert caught.value.param == param
    with lite.database.read() as session:
        found = session.execute(text("select name, tax_id, next_number from sellers")).all()
    assert [tuple(row) for row in found] in ([], [("Tollhouse", "", 1)])


def test_a_logo_may_have_all_of_its_bytes(lite: Deployment) -> None:
    full = png() + bytes(2**18 - len(png()))
    change(lite, logo=full)
    with pytest.raises(BadRequest, match="at most 256 KiB"):
        change(lite, logo=full + b"0")


def test_every_text_but_the_name_may_be_emptied(lite: Deployment) -> None:
    texts = ("address", "bank_details", "footer")
    change(lite, name="Tolls", **dict.fromkeys(texts, "x"))
    change(lite, **dict.fromkeys(texts, " "))
    with lite.database.read() as session:
        query = text("select name, address, bank_details, footer from sellers")
        assert tuple(session.execute(query).one()) == ("Tolls", "", "", "")


def note_on(deployment: Deployment, invoice_id: str, net_minor: int, number: int) -> CreditNote:
    with deployment.database.transaction() as session:
        return credit_notes.issue(
            session,
            invoice_id=invoice_id,
            net_minor=net_minor,
            reason="a <b>goodwill</b> note",
            reference=f"note-{number}",
            at=deployment.clock.now(),
        )


def test_the_tax_of_credit_notes_is_rounded_to_the_nearest_and_adds_up(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        add_rate(session, "DE", "VAT", 190_000, lite.clock.now())
        session.execute(text("update billing_accounts set tax_region = 'DE'"))
    plan(lite, base_fee=units_of("100"))
    subscribe(lite, "pro")
    lite.clock.advance(days=32)
    (invoice_id, *_) = finals(lite, 2)
    with lite.database.read() as session:
        invoice = invoices.get(session, invoice_id)
        net, tax = invoice.subtotal_minor, invoice.tax_minor
    assert tax == round(net * 19 / 100) > 0
    taxes = []
    for number in range(3):
        before = sum(taxes)
        noted = note_on(lite, invoice_id, 5, number).tax_minor  # 0.95 cents of tax
        taxes.append(noted)
        assert sum(taxes) == before + noted
    assert taxes == [1, 1, 1]
    rest = note_on(lite, invoice_id, net - 15, 9)
    assert sum(taxes) + rest.tax_minor == tax


def test_a_credit_note_has_a_document(lite: Deployment) -> None:
    change(lite, **PROFILE)
    lite.record(lite.event(output_tokens=10_000_000))
    (invoice_id,) = finals(lite)
    note = note_on(lite, invoice_id, 123, 1)
    with lite.database.read() as session:
        page = credit_note_page(session, credit_notes.get(session, note.label))
    for stated in (note.label, "EX-001001", "1.23", "Example AI GmbH", "deducted"):
        assert stated in page, stated
    assert "<b>goodwill" not in page and "&lt;b&gt;goodwill" in page
    assert as_pdf(page).startswith(b"%PDF-")


def test_a_draft_shows_the_credit_that_its_final_invoice_uses(lite: Deployment) -> None:
    plan(lite, base_fee=units_of("31"))
    subscribe(lite, "pro")
    with lite.database.transaction() as session:
        for kind, amount in ((credits.PROMO, "4"), (credits.PREPAID, "10")):
            credits.grant(
                session,
                tenant_id="acme",
                kind=kind,
                money=Money(units_of(amount), "USD"),
                reference=f"grant-{kind}",
                at=lite.clock.now(),
            )
    lite.record(lite.event(output_tokens=1_000_000))
    lite.rate()
    with lite.database.read() as session:
        left = session.execute(text("select sum(remaining) from credit_grants")).scalar()
    invoice_run.run(lite.database, lite.clock, final=False)
    with lite.database.read() as session:
        (draft,) = session.execute(text("select id from invoices")).scalars()
        shown = invoice_json(session, invoices.get(session, draft))
        after = session.execute(text("select sum(remaining) from credit_grants")).scalar()
    assert shown["status"] == "draft" and after == left, (left, after)
    (final,) = [each for each in finals(lite, 33) if each == draft]
    with lite.database.read() as session:
        stated = invoice_json(session, invoices.get(session, final))
    for name in ("subtotal", "promotional_credit", "tax", "total", "prepaid", "due"):
        assert shown[name] == stated[name], name
    assert stated["promotional_credit"]["minor"] == 400 and stated["prepaid"]["minor"] == 1000


def test_two_drafts_do_not_show_the_same_credit(lite: Deployment) -> None:
    """In the grace period, the ended period and the running one are drafts at once."""
    plan(lite, base_fee=units_of("31"), grace_hours=24 * 14)
    subscribe(lite, "pro")
    with lite.database.transaction() as session:
        money, at = Money(units_of("40"), "USD"), lite.clock.now()
        credits.grant(
            session, tenant_id="acme", kind=credits.PROMO, money=money, reference="g", at=at
        )
    lite.clock.advance(days=35)
    for _ in range(2):  # a second run shows the same
        result = invoice_run.run(lite.database, lite.clock)
        assert not result.failed and not result.finalised and len(result.drafted) == 2, result
        with lite.database.read() as session:
            query = "select promo_minor, subtotal_minor from invoices order by period_start"
            (first, net), (second, _) = session.execute(text(query)).all()
        assert first == net > 0 and first + second == 40_00
    lite.clock.advance(days=60)
    assert len(invoice_run.run(lite.database, lite.clock).finalised) >= 2
    with lite.database.read() as session:
        drawn = session.execute(text(query)).all()[:2]
    assert [row[0] for row in drawn] == [first, second]
