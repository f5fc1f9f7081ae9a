"""The seller's profile by page, API and command; an invoice's tiles add up in every state."""

import json
import re
from base64 import b64encode
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from billing.accounts.accounts import ensure_account
from billing.invoicing import credit_notes, invoice_run
from billing.invoicing.tables import Invoice
from billing.subscriptions.subscriptions import subscribe
from billing.subscriptions.tables import Plan
from core.money import units_of
from dashboards.invoice_rows import totals
from gateway.cli.main import main
from tests.billing.invoicing.test_sellers import png
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import Deployment

PAGE, INVOICES = "/dashboard/operator/seller", "/dashboard/invoices"
FIELDS = {
    "act": "save",
    "name": "Example AI GmbH",
    "address": "Hafenstr. 1\r\n20457 Hamburg",
    "tax_region": "DE",
    "tax_id": "DE136695976",
    "bank_details": "IBAN DE02120300000000202051",
    "footer": "HRB 1",
    "number_prefix": "EX",
    "next_number": "42",
}


def api(deployment: Deployment) -> dict[str, str]:
    return {"authorization": f"Bearer {deployment.services.operator_token}"}


def test_the_profile_is_saved_by_the_page_and_shown_by_the_api(
    operator: httpx.Client, deployment: Deployment
) -> None:
    answer = operator.post(PAGE, data=FIELDS, files={"logo": ("logo.png", png(), "image/png")})
    assert answer.status_code == 200 and "The profile is saved" in answer.text, answer.text
    assert "EX-000042" in answer.text and answer.request.method == "GET"
    shown = httpx.get(f"{deployment.url}/admin/v1/seller", headers=api(deployment)).json()
    assert shown["address"] == "Hafenstr. 1\n20457 Hamburg" and shown["logo"] == "image/png"
    assert (shown["next_label"], shown["bank_details"]) == ("EX-000042", FIELDS["bank_details"])
    without = operator.post(PAGE, data={**FIELDS, "act": "remove_logo"})
    assert "Save without a logo" not in without.text


def test_a_refused_profile_says_why_and_keeps_what_was_typed(operator: httpx.Client) -> None:
    answer = operator.post(PAGE, data={**FIELDS, "tax_id": "DE1", "footer": "typed here"})
    assert answer.status_code == 400
    assert "DE1" in answer.text and "typed here" in answer.text
    logo = {"logo": ("logo.svg", b"<svg/>", "image/svg+xml")}
    refused = operator.post(PAGE, data=FIELDS, files=logo)
    assert refused.status_code == 400 and "PNG or JPEG" in refused.text


def test_only_the_operator_sees_it(deployment: Deployment) -> None:
    with closing(browser(deployment, deployment.key)) as owner:
        assert owner.get(PAGE).status_code == 403
        assert owner.post(PAGE, data=FIELDS).status_code == 403
        assert PAGE not in owner.get("/dashboard/").text


def test_the_api_takes_a_logo_and_refuses_one_that_is_none(deployment: Deployment) -> None:
    path = f"{deployment.url}/admin/v1/seller"
    taken = httpx.patch(path, json={"logo": b64encode(png()).decode()}, headers=api(deployment))
    assert taken.status_code == 200 and taken.json()["logo"] == "image/png", taken.text
    refused = httpx.patch(path, json={"logo": "R0lGODlh"}, headers=api(deployment))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logo"
    removed = httpx.patch(path, json={"logo": ""}, headers=api(deployment))
    assert removed.json()["logo"] is None


def test_the_command_shows_and_changes_it(
    deployment: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    (tmp_path / "logo.png").write_bytes(png())
    words = ["--address", "Quai 2\\n75001 Paris", "--logo", str(tmp_path / "logo.png"), "--json"]
    assert main(["seller", "set", "--footer", "RCS 1", *words]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert (changed["address"], changed["footer"]) == ("Quai 2\n75001 Paris", "RCS 1")
    assert main(["seller", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == changed
    for wrong in ([], ["--logo", "nowhere.png"], ["--tax-region", "Mars"], ["--next-number", "0"]):
        assert main(["seller", "set", *wrong]) == 2
        assert capsys.readouterr().err.startswith("tollhouse: ")


@pytest.mark.parametrize(
    ("status", "paid", "credited", "to_pay"),
    [
        ("draft", 0, 0, 700),
        ("final", 0, 0, 700),
        ("final", 300, 100, 300),
        ("paid", 700, 0, 0),
        ("void", 0, 0, 0),
        ("uncollectible", 200, 0, 0),
    ],
)
def test_the_tiles_add_up(status: str, paid: int, credited: int, to_pay: int) -> None:
    invoice = Invoice(
        status=status,
        currency="USD",
        subtotal_minor=1_000,
        promo_minor=100,
        tax_minor=90,
        total_minor=990,
        prepaid_minor=290,
        due_minor=700,
        paid_minor=paid,
        credited_minor=credited,
    )
    shown = [(tile.title, round(float(tile.value.split()[0]) * 100)) for tile in totals(invoice)]
    names = [name for name, _ in shown]
    total, last = names.index("Total"), len(names) - 1
    assert sum(cents for _, cents in shown[:total]) == shown[total][1] == 990
    assert sum(cents for _, cents in shown[total:last]) == shown[last][1] == to_pay
    assert names[last] == "To pay"


def test_the_pdf_of_a_credit_note_opens_by_its_link_and_only_for_its_tenant(
    deployment: Deployment,
) -> None:
    note = _credit_note(deployment)
    api_path = f"{deployment.url}/admin/v1/credit-notes/{note}/pdf"
    with closing(browser(deployment, deployment.key)) as owner:
        invoices = re.findall(r'href="(/dashboard/invoices/[^"/]+)"', owner.get(INVOICES).text)
        pages = [owner.get(path).text for path in dict.fromkeys(invoices)]
        (link,) = [
            href for page in pages for href in re.findall(r'href="([^"]+)"', page) if note in href
        ]
        document = owner.get(link)
        assert document.status_code == 200 and document.content.startswith(b"%PDF-")
        assert document.headers["content-type"] == "application/pdf"
        assert f"credit-note-{note}.pdf" in document.headers["content-disposition"]
        unknown = owner.get(link.replace(note, "CN-999999"))
        assert unknown.status_code == 404
    key = {"authorization": f"Bearer {deployment.key}"}
    assert httpx.get(api_path, headers=key).content.startswith(b"%PDF-")
    secret = _key_of_another_tenant(deployment)
    foreign = {"authorization": f"Bearer {secret}"}
    assert httpx.get(api_path, headers=foreign).status_code == 404
    with closing(browser(deployment, secret)) as other:
        assert other.get(link).status_code == 404


def _credit_note(deployment: Deployment) -> str:
    """The number of a credit note on a final invoice, of a period that ended two months ago."""
    services, tenant_id = deployment.services, deployment.tenant_id
    now = services.clock.now()
    with services.database.transaction() as session:
        ensure_account(session, tenant_id, now - timedelta(days=70))
        terms = {"base_fee": units_of("31"), "currency": "USD", "name": "pro", "id": "plan_pro"}
        session.add(Plan(created_at=now, **terms))
        session.flush()
        subscribe(session, tenant_id, "pro", now - timedelta(days=70))
    invoice_run.run(services.database, services.clock, [tenant_id])
    with services.database.transaction() as session:
        invoice = session.scalars(select(Invoice).where(Invoice.number.is_not(None))).first()
        assert invoice is not None
        note = credit_notes.issue(
            session, invoice_id=invoice.id, net_minor=123, reason="goodwill", reference="n", at=now
        )
        return note.label


def _key_of_another_tenant(deployment: Deployment) -> str:
    path = f"{deployment.url}/admin/v1/tenants"
    made = httpx.post(path, json={"name": "rival"}, headers=api(deployment))
    assert made.status_code == 201, made.text
    return with_role(deployment, "finance", made.json()["id"])
