"""Add-ons and the limits of billing plans by page, API and command."""

import json

import httpx
import pytest

from core.tenants.models import AuditEntry, Tenant
from gateway.cli.main import main
from tests.gateway.deployment import Deployment

PLANS = "/dashboard/operator/plans"


def test_add_ons_and_limits_by_page_api_and_command(
    deployment: Deployment,
    operator: httpx.Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services, tenant = deployment.services, deployment.tenant_id
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(services.settings.data_dir))
    api = f"/admin/v1/tenants/{tenant}/add-ons"
    page = f"/dashboard/operator/tenants/{tenant}/billing"
    # The catalogue: one add-on each way, and a plan whose limits are those of `trial`.
    support = {"name": "support", "fee": "40", "currency": "USD"}
    assert operator.post("/admin/v1/add-ons", json=support).status_code == 201
    assert operator.post("/admin/v1/add-ons", json=support).status_code == 409
    assert main(["tenant", "add-on-add", "storage", "--fee", "2.50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["fee"]["amount"] == "2.5"
    form = {"act": "add_on", "add_on": "audit", "currency": "USD", "interval": "month"}
    assert "The add-on was created" in operator.post(PLANS, data={**form, "fee": "7"}).text
    wrong = operator.post(PLANS, data={**form, "add_on": "x", "fee": "much"})
    assert wrong.status_code == 400 and 'value="much"' in wrong.text
    names = [each["name"] for each in operator.get("/admin/v1/add-ons").json()["data"]]
    assert names == ["audit", "storage", "support"]
    with services.database.read() as session:
        before = session.get_one(Tenant, tenant).plan
    from core.tenants.plans import PLANS as LIMITS

    other = next(name for name in sorted(LIMITS) if name != before)
    words = ["tenant", "plan-add", "team", "--base-fee", "10", "--limits-plan", other]
    assert main(words) == 0
    bad = {"name": "odd", "limits_plan": "nothing"}
    assert operator.post("/admin/v1/billing-plans", json=bad).status_code == 400
    refused = operator.put(api, json={"add_on": "support", "quantity": 1})
    assert refused.status_code == 404 and "no subscription" in refused.text
    # The tenant.
    path = f"/admin/v1/tenants/{tenant}/subscription"
    assert operator.post(path, json={"plan": "team"}).status_code == 201
    with services.database.read() as session:
        assert session.get_one(Tenant, tenant).plan == other
    set_two = operator.put(api, json={"add_on": "support", "quantity": 2})
    assert set_two.json()["data"][0]["fee"]["amount"] == "80"
    sent = {"act": "add_on", "add_on": "audit", "quantity": "1"}
    assert "The add-on is changed" in operator.post(page, data=sent).text
    assert operator.post(page, data={**sent, "quantity": "-1"}).status_code == 400
    capsys.readouterr()
    assert main(["tenant", "add-on", "--tenant", tenant, "storage", "--quantity", "4"]) == 0
    capsys.readouterr()
    assert main(["tenant", "add-ons", "--tenant", tenant, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(each["add_on"], each["quantity"]) for each in rows] == [
        ("support", 2),
        ("audit", 1),
        ("storage", 4),
    ]
    assert operator.get(api).json()["data"] == rows
    shown = operator.get(page).text
    assert "storage" in shown and "80.00" in shown
    assert main(["tenant", "unsubscribe", "--tenant", tenant]) == 0
    with services.database.read() as session:
        assert session.get_one(Tenant, tenant).plan == before
        assert session.query(AuditEntry).filter_by(action="add_on.set").count() == 3
