"""Bank statements by page, API and command."""

import json
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from billing.accounts.tables import BillingAccount
from billing.invoicing.views import payment_reference
from gateway.cli.main import main
from tests.dashboards.billed import bill_a_fee, whole_invoice
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment

PAGE = "/dashboard/operator/bank-lines"
API = "/admin/v1/bank-lines"
HEAD = "id,date,amount,currency,text\n"


@pytest.fixture(scope="module")
def deployment(deployment: Deployment) -> Deployment:
    """With a final invoice of 100.00."""
    bill_a_fee(deployment)
    return deployment


def test_a_statement_is_imported_and_corrected_by_page(
    deployment: Deployment, operator: httpx.Client
) -> None:
    reference = payment_reference(whole_invoice(deployment))
    text = f"{HEAD}p-1,2026-02-10,30.00,USD,{reference}\np-2,2026-02-10,5.00,USD,no name\n"
    file = {"statement": ("bank.csv", text.encode(), "text/csv")}
    shown = operator.post(f"{PAGE}/import", data={"act": "import"}, files=file)
    assert shown.status_code == 200 and "The statement is imported" in shown.text
    assert "no known reference" in shown.text and "30.00" in shown.text
    assert whole_invoice(deployment).paid_minor == 3000
    rows = operator.get(API, params={"status": "unmatched"}).json()["data"]
    (waits,) = [each for each in rows if each["bank_id"] == "p-2"]
    wrong = operator.post(PAGE, data={"act": "assign", "id": waits["id"], "target": "nobody"})
    assert wrong.status_code == 400 and "nobody" in wrong.text
    sent = {"act": "assign", "id": waits["id"], "target": whole_invoice(deployment).label}
    assert operator.post(PAGE, data=sent).status_code == 200
    assert whole_invoice(deployment).paid_minor == 3500
    undo = {"act": "unassign", "id": waits["id"], "reason": "not theirs"}
    assert operator.post(PAGE, data=undo).status_code == 200
    assert whole_invoice(deployment).paid_minor == 3000
    gone = operator.post(PAGE, data={"act": "ignore", "id": waits["id"], "reason": "interest"})
    assert gone.status_code == 200 and "dismissed" in gone.text
    assert "p-2" in operator.get(f"{PAGE}?format=csv").text
    bad = operator.post(f"{PAGE}/import", files={"statement": ("x", b"<a", "text/xml")})
    assert bad.status_code == 400 and "not complete XML" in bad.text
    empty = operator.post(f"{PAGE}/import", data={"act": "import"})
    assert empty.status_code == 400 and "No file was chosen" in empty.text


def test_the_same_by_api(deployment: Deployment, operator: httpx.Client) -> None:
    before = whole_invoice(deployment).paid_minor
    content = (
        f"{HEAD}a-1,2026-02-11,2.50,USD,{whole_invoice(deployment).label}\na-2,2026-02-11,1,USD,x\n"
    )
    path = "/admin/v1/bank-statements"
    made = operator.post(path, json={"content": content})
    assert made.status_code == 201 and (made.json()["matched"], made.json()["unmatched"]) == (1, 1)
    assert operator.post(path, json={"content": content}).json()["known"] == 2
    assert whole_invoice(deployment).paid_minor == before + 250
    (first, second) = sorted(made.json()["data"], key=lambda each: each["bank_id"])
    assert first["acts"][0]["invoice"] == whole_invoice(deployment).label
    taken = operator.post(f"{API}/{first['id']}/unassign", json={"reason": "twice"})
    assert taken.json()["status"] == "unmatched" and whole_invoice(deployment).paid_minor == before
    assigned = operator.post(f"{API}/{first['id']}/assign", json={"target": deployment.tenant_id})
    assert assigned.json()["status"] == "matched"
    dropped = operator.post(f"{API}/{second['id']}/dismiss", json={"reason": "interest"})
    assert dropped.json()["status"] == "dismissed"
    assert operator.post(path, json={"content": "<!DOCTYPE a []><a/>"}).status_code == 400
    assert operator.get(API, params={"status": "odd"}).status_code == 400
    assert operator.post(f"{API}/bl_0/assign", json={"target": "x"}).status_code == 404
    own = httpx.get(f"{deployment.url}{API}", headers=deployment.headers)
    assert own.status_code == 403


def test_the_same_by_command(
    deployment: Deployment,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))
    file = tmp_path / "bank.csv"
    file.write_text(
        f"nr;date;amount;currency;text\nc-1;2026-02-12;1,25;USD;{whole_invoice(deployment).label}\n"
        "c-2;2026-02-12;1,00;USD;nothing\n"
    )
    assert main(["payment", "import", str(file), "--column", "id=nr", "--json"]) == 0
    rows = {each["bank_id"]: each for each in json.loads(capsys.readouterr().out)}
    assert rows["c-1"]["status"] == "matched" and rows["c-2"]["status"] == "unmatched"
    first, second = rows["c-1"]["id"], rows["c-2"]["id"]
    assert main(["payment", "unassign", "--line", first, "--reason", "wrong"]) == 0
    label = whole_invoice(deployment).label or ""
    assert main(["payment", "assign", "--line", first, label]) == 0
    assert main(["payment", "ignore", "--line", second, "--reason", "interest"]) == 0
    capsys.readouterr()
    assert main(["payment", "lines", "--status", "dismissed", "--json"]) == 0
    assert "c-2" in {each["bank_id"] for each in json.loads(capsys.readouterr().out)}
    assert main(["payment", "import", str(tmp_path / "none.csv")]) == 2
    assert main(["payment", "import", str(file), "--column", "id"]) == 2


def test_terms_and_reference_of_a_customer(deployment: Deployment, operator: httpx.Client) -> None:
    path = f"/admin/v1/tenants/{deployment.tenant_id}/billing"
    shown = operator.patch(path, json={"payment_terms_days": 30}).json()
    assert shown["payment_terms_days"] == 30 and shown["payment_reference"].startswith("RF")
    assert (
        operator.patch(path, json={"payment_terms_days": None}).json()["payment_terms_days"] is None
    )
    page = f"/dashboard/operator/tenants/{deployment.tenant_id}/billing"
    assert shown["payment_reference"][:4] in operator.get(page).text
    fields = {"act": "details", "collection": "manual", "payment_terms_days": "45"}
    assert operator.post(page, data=fields).status_code == 200
    with deployment.services.database.read() as session:
        assert session.get_one(BillingAccount, deployment.tenant_id).payment_terms_days == 45
    bad = operator.post(page, data={**fields, "payment_terms_days": "9999"})
    assert bad.status_code == 400 and "0 to 365" in bad.text


def test_billing_details_by_command(
    deployment: Deployment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))
    words = ["tenant", "billing", "--tenant", deployment.tenant_id, "--json"]
    more = ["--payment-terms", "60", "--payment-method", "card", "--legal-name", "Acme GmbH"]
    assert main([*words, *more]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["payment_terms_days"], shown["payment_methods"]) == (60, ["card"])
    assert shown["legal_name"] == "Acme GmbH"
    assert main([*words, "--payment-terms", "default", "--payment-method", "default"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["payment_terms_days"], shown["payment_methods"]) == (None, None)
    assert main([*words, "--payment-terms", "soon"]) == 2
    assert main([*words, "--payment-method", "sepa_debit"]) == 2


def test_payment_methods_by_api_and_page(deployment: Deployment, operator: httpx.Client) -> None:
    path = f"/admin/v1/tenants/{deployment.tenant_id}/billing"
    chosen = {"payment_methods": ["customer_balance", "card"]}
    shown = operator.patch(path, json=chosen).json()
    assert shown["payment_methods"] == ["card", "customer_balance"]
    refused = operator.patch(path, json={"payment_methods": ["sepa_debit"]})
    assert refused.status_code == 400 and "takes EUR" in refused.text
    page = f"/dashboard/operator/tenants/{deployment.tenant_id}/billing"
    fields = {"act": "details", "collection": "manual", "payment_methods": "us_bank_account"}
    assert operator.post(page, data=fields).status_code == 200
    bad = operator.post(page, data={**fields, "payment_methods": "cash"})
    assert bad.status_code == 400 and "no payment method" in bad.text
    assert operator.patch(path, json={"payment_methods": None}).json()["payment_methods"] is None


def test_a_tenant_sees_how_to_pay_by_wire(deployment: Deployment) -> None:
    invoice = whole_invoice(deployment)
    with closing(browser(deployment, deployment.key)) as owner:
        page = owner.get(f"/dashboard/invoices/{invoice.id}").text
    assert f"By wire, state the reference {payment_reference(invoice)[:4]}" in page
