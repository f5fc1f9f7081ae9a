"""A ledger account with its running balance by page, CSV, API and command."""

import json

import httpx
import pytest

from billing.accounts.accounts import ensure_account
from billing.ledger import credits
from core.money import Money, units_of
from gateway.cli.main import main
from tests.gateway.deployment import Deployment

PAGE = "/dashboard/operator/ledger/cash"


@pytest.fixture(scope="module")
def deployment(deployment: Deployment) -> Deployment:
    """With prepaid credit of 10 and of 2.345678."""
    services = deployment.services
    with services.database.transaction() as session:
        now = services.clock.now()
        ensure_account(session, deployment.tenant_id, now)
        for amount in ("10", "2.345678"):
            credits.grant(
                session,
                tenant_id=deployment.tenant_id,
                kind="prepaid",
                money=Money(units_of(amount), "USD"),
                reference=f"wire-{amount}",
                at=now,
            )
    return deployment


def test_the_balance_is_the_same_everywhere(
    deployment: Deployment,
    operator: httpx.Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        'href="/dashboard/operator/ledger/cash?currency=USD"'
        in operator.get("/dashboard/operator/ledger").text
    )
    page = operator.get(PAGE).text
    assert "Entries of cash" in page and "12.345678" in page and "wire-10" in page
    lines = operator.get(f"{PAGE}?format=csv").text.splitlines()
    assert lines[0].startswith("Time,Tenant,Kind,Reference,Debit (USD),Credit (USD),Balance (USD)")
    assert ",10,,10," in lines[1] and ",2.345678,,12.345678," in lines[2]
    shown = operator.get("/admin/v1/ledger/accounts/cash").json()
    assert [line["balance"]["amount"] for line in shown["data"]] == ["10", "12.345678"]
    first = operator.get("/admin/v1/ledger/accounts/cash?limit=1").json()
    rest = operator.get(f"/admin/v1/ledger/accounts/cash?after={first['next']}").json()
    assert rest["opening"]["amount"] == "10" and rest["data"] == shown["data"][1:]
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    assert main(["export", "ledger-account", "cash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown["data"]
    assert main(["export", "ledger-account", "cash"]) == 0
    assert "12.345678" in capsys.readouterr().out


def test_what_is_wrong_is_refused(deployment: Deployment, operator: httpx.Client) -> None:
    assert operator.get("/dashboard/operator/ledger/petty").status_code == 404
    for wrong in ("currency=ABC", "from=soon", "from=2026-02-02&to=2026-01-01", "tenant=nobody"):
        assert operator.get(f"{PAGE}?{wrong}").status_code in (400, 404), wrong
        answer = operator.get(f"/admin/v1/ledger/accounts/cash?{wrong}")
        assert answer.status_code in (400, 404, 422), wrong
    assert operator.get("/admin/v1/ledger/accounts/cash?after=99999999").status_code == 400
    own = httpx.get(f"{deployment.url}/admin/v1/ledger/accounts/cash", headers=deployment.headers)
    assert own.status_code == 403
