"""Tax details and the billing address of a tenant: previewed, confirmed by its name, and undone."""

from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import select

from billing.accounts.tables import BillingAccount
from billing.adjustments.tables import MoneyAct
from billing.payments.tables import Payment
from core.tenants.models import AuditEntry
from tests.dashboards.billed import bill_a_fee, whole_invoice
from tests.dashboards.test_money_pages import reference
from tests.gateway.deployment import Deployment, running_deployment

NEW = "/dashboard/operator/money-acts/new"
TAX = {"kind": "tax", "tax_region": "DE", "tax_id": "DE136695976", "postal_code": "80331"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("details")) as made:
        bill_a_fee(made)
        yield made


def account_of(deployment: Deployment) -> BillingAccount:
    with deployment.services.database.read() as session:
        return session.get_one(BillingAccount, deployment.tenant_id)


def test_tax_details_are_previewed_confirmed_and_undone(
    operator: httpx.Client, deployment: Deployment
) -> None:
    tenant = deployment.tenant_id
    billing = operator.get(f"/dashboard/operator/tenants/{tenant}/billing").text
    assert "Change tax details…" in billing and "Change the address…" in billing
    fields = TAX | {"target": tenant, "tax_exempt": "yes", "reason": "moved to Munich"}
    wrong = operator.get(NEW, params=fields | {"tax_id": "DE1"})
    assert wrong.status_code == 400 and 'value="80331"' in wrong.text, "what was typed is kept"
    seen = operator.get(NEW, params=fields).text
    for words in (
        "Tax region: none → DE",
        "Tax id: none → DE136695976",
        "Exempt from tax: no → yes",
        "No posting now",
        "Type “demo” to change",
    ):
        assert words in seen, words
    assert account_of(deployment).tax_region == "", "a preview stores nothing"
    sent = fields | {"act": "post", "reference": reference(seen)}
    assert operator.post(NEW, data=sent | {"confirm": "0.00"}).status_code == 400
    assert account_of(deployment).tax_region == ""
    assert "It is posted." in operator.post(NEW, data=sent | {"confirm": "demo"}).text
    account = account_of(deployment)
    found = (account.tax_region, account.tax_id, account.postal_code, account.tax_exempt)
    assert found == ("DE", "DE136695976", "80331", True)
    assert 'value="80331"' in operator.get(NEW, params={"kind": "tax", "target": tenant}).text
    with deployment.services.database.read() as session:
        act = session.scalars(select(MoneyAct).where(MoneyAct.kind == "tax")).one()
        logged = session.scalars(select(AuditEntry.action).where(AuditEntry.target == tenant)).all()
    assert "billing.change" in logged
    undo = {"kind": "undo", "target": act.id, "reason": "not yet"}
    seen = operator.get(NEW, params=undo).text
    assert "Tax region: DE → none" in seen and "Type “demo” to post" in seen
    done = operator.post(
        NEW, data=undo | {"act": "post", "reference": reference(seen), "confirm": "demo"}
    )
    assert "It is posted." in done.text
    account = account_of(deployment)
    assert (account.tax_region, account.tax_id, account.tax_exempt) == ("", "", False)


def test_an_address_that_was_changed_again_is_not_undone(
    operator: httpx.Client, deployment: Deployment
) -> None:
    def _set(name: str) -> str:
        fields = {"kind": "address", "target": deployment.tenant_id, "legal_name": name}
        fields |= {"address": "Weg 1\r\nBern", "email": "", "reason": f"to {name}"}
        seen = operator.get(NEW, params=fields).text
        assert f"→ {name}" in seen
        sent = fields | {"act": "post", "reference": reference(seen), "confirm": "demo"}
        assert "It is posted." in operator.post(NEW, data=sent).text
        with deployment.services.database.read() as session:
            query = select(MoneyAct.id).where(MoneyAct.reason == f"to {name}")
            return session.scalars(query).one()

    first, last = _set("Demo AG"), _set("Demo SE")
    assert account_of(deployment).address == "Weg 1\nBern"
    refused = operator.get(NEW, params={"kind": "undo", "target": first, "reason": "a slip"})
    assert refused.status_code == 409 and "was changed again since" in refused.text
    seen = operator.get(NEW, params={"kind": "undo", "target": last, "reason": "a slip"})
    assert "Legal name: Demo SE → Demo AG" in seen.text
    same = {"kind": "address", "target": deployment.tenant_id, "legal_name": "Demo SE"}
    same |= {"address": "Weg 1\nBern", "email": "", "reason": "again"}
    assert "This changes nothing." in operator.get(NEW, params=same).text


def test_a_payment_of_the_list_opens_to_its_refund(
    operator: httpx.Client, deployment: Deployment
) -> None:
    invoice = whole_invoice(deployment)
    wire = {"kind": "wire", "target": invoice.id, "amount": "10.00", "reason": "MT940 7"}
    seen = operator.get(NEW, params=wire).text
    operator.post(
        NEW, data=wire | {"act": "post", "reference": reference(seen), "confirm": "10.00"}
    )
    with deployment.services.database.read() as session:
        payment = session.scalars(select(Payment)).one()
    listed = operator.get("/dashboard/operator/payments").text
    assert "Refund…" in listed and payment.id in listed
    refund = {"kind": "refund", "target": payment.id, "amount": "4.00", "reason": "overpaid"}
    seen = operator.get(NEW, params=refund).text
    assert "What will be posted" in seen and "4.00 USD" in seen and "Type “4.00” to post" in seen
    sent = refund | {"act": "post", "reference": reference(seen), "confirm": "4.00"}
    assert "It is posted." in operator.post(NEW, data=sent).text
    head = operator.get("/dashboard/operator/payments?format=csv").text.splitlines()[0]
    assert "Change" not in head
