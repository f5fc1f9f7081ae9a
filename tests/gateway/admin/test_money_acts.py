"""Named operators, and acts on money over /admin/v1 and the command line."""

import json
from pathlib import Path

import httpx
import pytest

from billing.invoicing import invoice_run
from core.tenants import operators
from gateway.cli.main import main
from tests.gateway.deployment import Deployment, running_deployment


@pytest.fixture
def deployment(tmp_path: Path):  # type: ignore[no-untyped-def]
    settings = {"four_eyes_above": "10"}
    with running_deployment(tmp_path / "made", settings=settings) as made:
        yield made


def token(deployment: Deployment, name: str, role: str = "accountant") -> str:
    with deployment.services.database.transaction() as session:
        return operators.add(session, deployment.services.clock, "operator", name, role)[1]


def send(deployment: Deployment, secret: str, method: str, path: str, body: object = None):  # type: ignore[no-untyped-def]
    headers = {"authorization": f"Bearer {secret}"}
    url = f"{deployment.url}/admin/v1{path}"
    return httpx.request(method, url, json=body, headers=headers, timeout=60)


def grant(amount: str, reference: str) -> dict[str, object]:
    return {"kind": "grant", "target": "demo", "amount": amount, "reference": reference}


def test_an_accountant_acts_on_money_and_on_nothing_else(deployment: Deployment) -> None:
    ann = token(deployment, "ann")
    made = send(deployment, ann, "POST", "/money-acts", grant("5", "a"))
    assert made.status_code == 201 and made.json()["requested_by"] == "operator:ann", made.text
    assert send(deployment, ann, "GET", "/trial-balance").status_code == 200
    price = {"model": "m", "terms": {"input": "1"}}
    for path, body in (("/prices", price), ("/tenants", {"name": "x"}), ("/operators", {})):
        assert send(deployment, ann, "POST", path, body).status_code in (403, 422), path
    assert send(deployment, ann, "POST", "/prices", price).status_code == 403
    root = deployment.services.operator_token
    assert send(deployment, root, "DELETE", "/operators/ann").json()["disabled_at"]
    assert send(deployment, ann, "GET", "/trial-balance").status_code == 401


def test_two_operators_post_a_large_act(deployment: Deployment) -> None:
    ann, root = token(deployment, "ann"), deployment.services.operator_token
    seen = send(deployment, ann, "POST", "/money-acts/preview", grant("11", "b")).json()
    assert seen["needs_second"] is True
    assert {each["account"]: each["amount"]["amount"] for each in seen["postings"]} == {
        "cash": "11",
        "prepaid": "-11",
    }
    asked = send(deployment, ann, "POST", "/money-acts", grant("11", "b"))
    assert (asked.status_code, asked.json()["status"]) == (202, "waiting"), asked.text
    path = f"/money-acts/{asked.json()['id']}"
    refused = send(deployment, ann, "POST", f"{path}/confirm")
    assert refused.status_code == 403 and "cannot confirm" in refused.text
    waiting = send(deployment, ann, "GET", "/money-acts?status=waiting").json()["data"]
    assert [each["id"] for each in waiting] == [asked.json()["id"]]
    posted = send(deployment, root, "POST", f"{path}/confirm").json()
    assert (posted["status"], posted["decided_by"]) == ("posted", "operator")


def test_the_older_routes_wait_too(deployment: Deployment) -> None:
    root = deployment.services.operator_token
    body = {"kind": "promo", "amount": "12", "reference": "gift"}
    asked = send(deployment, root, "POST", "/tenants/demo/credits", body)
    assert (asked.status_code, asked.json()["status"]) == (202, "waiting"), asked.text
    bob = token(deployment, "bob")
    act = asked.json()["id"]
    rejected = send(deployment, bob, "POST", f"/money-acts/{act}/reject", {"reason": "no"})
    assert rejected.json()["status"] == "rejected"


def test_an_add_on_above_the_amount_waits_for_a_second_operator(deployment: Deployment) -> None:
    """12 units at 1.00 a month; below the amount, 2 units, it is set at once."""
    root, ann = deployment.services.operator_token, token(deployment, "ann")
    add_on = {"name": "seats", "currency": "USD", "interval": "month", "fee": "1.00"}
    assert send(deployment, root, "POST", "/add-ons", add_on).status_code == 201
    plan = {"name": "team", "currency": "USD", "interval": "month", "base_fee": "5"}
    assert send(deployment, root, "POST", "/billing-plans", plan).status_code == 201
    path = "/tenants/demo/add-ons"
    subscribed = send(deployment, root, "POST", "/tenants/demo/subscription", {"plan": "team"})
    assert subscribed.status_code == 201, subscribed.text
    asked = send(deployment, ann, "PUT", path, {"add_on": "seats", "quantity": 12})
    assert (asked.status_code, asked.json()["status"]) == (202, "waiting"), asked.text
    assert send(deployment, root, "GET", path).json()["data"] == []
    act = f"/money-acts/{asked.json()['id']}"
    assert send(deployment, ann, "POST", f"{act}/confirm").status_code == 403
    assert send(deployment, root, "POST", f"{act}/confirm").json()["status"] == "posted"
    assert [row["quantity"] for row in send(deployment, root, "GET", path).json()["data"]] == [12]
    small = send(deployment, ann, "PUT", path, {"add_on": "seats", "quantity": 2})
    assert small.status_code == 200 and small.json()["data"][-1]["quantity"] == 2, small.text


def test_the_command_asks_and_another_s_token_confirms(
    deployment: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path / "made"))
    monkeypatch.setenv("TOLLHOUSE_FOUR_EYES_ABOVE", "10")
    invoice_run.run(deployment.services.database, deployment.services.clock)
    words = ["grant", "demo", "--amount", "20", "--reference", "cli-1", "--term", "kind=promo"]
    assert main(["money", "preview", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["account"] == "promotion"
    assert main(["money", "post", *words, "--json"]) == 0
    act = json.loads(capsys.readouterr().out)
    assert act["status"] == "waiting" and act["requested_by"] == "operator"
    assert main(["money", "confirm", act["id"]]) == 1
    assert "cannot confirm it" in capsys.readouterr().err
    assert main(["operator", "add", "ann", "--json"]) == 0
    (tmp_path / "token").write_text(json.loads(capsys.readouterr().out)["token"] + "\n")
    words = ["--token-file", str(tmp_path / "token"), "--json"]
    assert main(["money", "confirm", act["id"], *words]) == 0
    assert json.loads(capsys.readouterr().out)["decided_by"] == "operator:ann"
    assert main(["money", "list", "--status", "posted", "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == [act["id"]]
    assert main(["operator", "disable", "ann"]) == 0
    assert main(["operator", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]["disabled_at"]
    assert main(["money", "reject", act["id"]]) == 2
