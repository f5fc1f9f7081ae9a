"""The margin by page, CSV, API and command: the same figures, and what is wrong is refused."""

import json
from datetime import timedelta

import httpx
import pytest

from billing.audit import reconcile
from billing.pricing.prices import ensure_default_prices
from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups
from billing.usage.usage import record
from core.tenants.models import AuditEntry
from gateway.cli.main import main
from tests.dashboards.usage_events import usage_event
from tests.gateway.deployment import Deployment

PAGE = "/dashboard/operator/margin"


@pytest.fixture(scope="module")
def deployment(deployment: Deployment) -> Deployment:
    """One request of 1,000,000 input tokens (0.15) that took 40 s of an engine."""
    services = deployment.services
    now = services.clock.now()
    with services.database.transaction() as session:
        price = ensure_default_prices(session, services.clock, "tiny").id
        event = usage_event(
            now - timedelta(hours=1),
            price,
            tenant_id=deployment.tenant_id,
            input_tokens=1_000_000,
            output_tokens=0,
            adapter="law",
            engine_id="gpu-1",
            busy_us=40_000_000,
        )
        record(session, [event], services.clock)
    rate_all(services.database, services.clock)
    service_rollups.sum_all(services.database, services.clock)
    return deployment


def headers(deployment: Deployment) -> dict[str, str]:
    return {"authorization": f"Bearer {deployment.services.operator_token}"}


def test_page_file_api_and_command_show_the_same_margin(
    deployment: Deployment,
    operator: httpx.Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpriced = operator.get(PAGE).text
    assert "count as free: gpu-1" in unpriced
    today = f"{deployment.services.clock.now() - timedelta(days=2):%Y-%m-%d}"
    saved = operator.post(
        PAGE,
        data={
            "act": "price",
            "pool": "gpu-*",
            "per_hour": "9.00",
            "currency": "usd",
            "from": today,
        },
    )
    assert (
        saved.status_code == 200
        and "The price of engines is saved" in saved.text
        and "gpu-*" in saved.text
    )
    page = operator.get(PAGE)
    assert "count as free" not in page.text and "33.3 %" in page.text
    by_adapter = operator.get(f"{PAGE}?by=adapter&format=csv").text.splitlines()
    assert by_adapter[0] == (
        "Model,Adapter,Requests,Tokens,Revenue (USD),Per million tokens (USD),Engine seconds,"
        'Engine cost (USD),Margin (USD),"Margin, %"'
    )
    assert by_adapter[1] == "tiny,law,1,1000000,0.15,0.15,40.000000,0.1,0.05,33.3 %"
    shown = operator.get("/admin/v1/margin?by=model&by=adapter", headers=headers(deployment)).json()
    (row,) = shown["data"]
    assert (row["model"], row["adapter"], row["engine_seconds"]) == ("tiny", "law", "40.000000")
    assert (row["engine_cost"]["amount"], row["margin"]["amount"]) == ("0.1", "0.05")
    settings = deployment.services.settings
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(settings.data_dir))
    assert main(["price", "margin", "--by", "model", "--by", "adapter", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == shown["data"]
    assert main(["price", "margin"]) == 0
    assert "0.05 USD" in capsys.readouterr().out


def test_a_price_by_api_and_command_is_listed_and_recorded(
    deployment: Deployment,
    operator: httpx.Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"pool": "cpu-*", "per_hour": "0.40", "effective_from": "2026-01-01", "note": "lease"}
    made = operator.post("/admin/v1/engine-prices", json=body, headers=headers(deployment))
    assert made.status_code == 201, made.text
    assert made.json()["per_hour"]["amount"] == "0.4" and made.json()["from"] == "2026-01-01"
    with deployment.services.database.read() as session:
        acts = [row for row in session.query(AuditEntry) if row.action == "engine_price.set"]
    assert "cpu-*" in {row.target for row in acts}
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    words = ["price", "engine", "tpu", "--per-hour", "5", "--from", "2026-02-01", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["per_hour"]["amount"] == "5"
    assert main(["price", "engines", "--json"]) == 0
    listed = {row["pool"]: row for row in json.loads(capsys.readouterr().out)}
    assert listed["cpu-*"]["note"] == "lease" and listed["tpu"]["from"] == "2026-02-01"
    with_api = operator.get("/admin/v1/engine-prices", headers=headers(deployment)).json()["data"]
    assert {row["pool"] for row in with_api} == set(listed)


def test_what_is_wrong_is_refused(deployment: Deployment, operator: httpx.Client) -> None:
    kept = operator.post(PAGE, data={"act": "price", "pool": "a b", "per_hour": "1"})
    assert kept.status_code == 400 and "not a pattern" in kept.text and 'value="a b"' in kept.text
    assert operator.get(f"{PAGE}?by=region").status_code == 400
    for wrong in ("by=region", "from=2026-02-01&to=2026-01-01", "from=today"):
        answer = operator.get(f"/admin/v1/margin?{wrong}", headers=headers(deployment))
        assert answer.status_code in (400, 422), wrong
    for body in ({"pool": "*"}, {"pool": "*", "per_hour": "-1"}, {"pool": "", "per_hour": "1"}):
        answer = operator.post("/admin/v1/engine-prices", json=body, headers=headers(deployment))
        assert answer.status_code in (400, 422), body
    assert main(["price", "engine", "a b", "--per-hour", "1"]) == 2


def test_the_time_of_a_live_request_reaches_the_books(
    deployment: Deployment, operator: httpx.Client
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = httpx.post(
        f"{deployment.url}/v1/chat/completions", json=body, headers=deployment.headers
    )
    assert answer.status_code == 200, answer.text
    (event,) = deployment.events(1, request_id=answer.headers["x-request-id"])
    given = deployment.engine.receipts_given[event["request_id"]]
    assert event["busy_us"] == given.busy_us > 0
    rate_all(deployment.services.database, deployment.services.clock)
    service_rollups.sum_all(deployment.services.database, deployment.services.clock)
    shown = operator.get("/admin/v1/margin", headers=headers(deployment)).json()
    seconds = {row["model"]: row["engine_seconds"] for row in shown["data"]}
    assert seconds["tiny"] == f"{(40_000_000 + given.busy_us) / 1e6:.6f}"
    with deployment.services.database.read() as session:
        assert [each.check for each in reconcile.audit(session).differences] == []


def test_a_tenant_sees_no_margin(deployment: Deployment) -> None:
    own = {"authorization": f"Bearer {deployment.key}"}
    with httpx.Client(base_url=deployment.url) as client:
        assert client.get("/admin/v1/margin", headers=own).status_code == 403
        assert client.get("/admin/v1/engine-prices", headers=own).status_code == 403
