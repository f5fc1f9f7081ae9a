"""Exchange rates by page, API and command, and reports in one currency."""

import json
from pathlib import Path

import httpx
import pytest

from billing.pricing.prices import ensure_default_prices
from billing.rating.rating_worker import rate_all
from billing.usage.usage import record
from core.tenants.models import AuditEntry
from gateway.cli.main import main
from tests.dashboards.usage_events import usage_event
from tests.gateway.deployment import Deployment

PAGE = "/dashboard/operator/exchange-rates"
API = "/admin/v1/exchange-rates"


@pytest.fixture(scope="module")
def deployment(deployment: Deployment) -> Deployment:
    """With usage of 0.15 dollars today."""
    services = deployment.services
    with services.database.transaction() as session:
        price = ensure_default_prices(session, services.clock, "tiny").id
        event = usage_event(
            services.clock.now(),
            price,
            tenant_id=deployment.tenant_id,
            input_tokens=1_000_000,
            output_tokens=0,
        )
        record(session, [event], services.clock)
    rate_all(services.database, services.clock)
    return deployment


def test_a_rate_is_recorded_and_reports_use_and_show_it(
    deployment: Deployment,
    operator: httpx.Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    today = f"{deployment.services.clock.now():%Y-%m-%d}"
    for path in ("/dashboard/operator/margin", "/dashboard/operator/revenue", "/admin/v1/revenue"):
        missing = operator.get(f"{path}?reporting=EUR")
        assert missing.status_code == 400 and "There is no rate of USD to EUR" in missing.text, path
        assert operator.get(f"{path}?reporting=ABC").status_code == 400
    form = {"act": "save", "day": today, "base": "EUR", "quote": "USD", "rate": "1.25"}
    saved = operator.post(PAGE, data=form)
    assert saved.status_code == 200 and "The exchange rates are saved" in saved.text
    # 0.15 / 1.25
    shown = operator.get("/admin/v1/margin?reporting=EUR").json()
    assert shown["total"]["revenue"] == {
        "amount": "0.12",
        "units": "120000000000",
        "currency": "EUR",
    }
    assert shown["rates"] == [{"day": today, "base": "EUR", "quote": "USD", "rate": "1.25"}]
    assert operator.get("/admin/v1/margin").json()["total"]["revenue"]["amount"] == "0.15"
    (whole,) = operator.get("/admin/v1/revenue?reporting=EUR").json()["data"]
    assert (whole["currency"], whole["used"]) == ("EUR", 120_000_000_000)
    (plain,) = operator.get("/admin/v1/revenue").json()["data"]
    assert (plain["currency"], plain["used"]) == ("USD", 150_000_000_000)
    for path in ("margin", "revenue"):
        page = operator.get(f"/dashboard/operator/{path}?reporting=EUR").text
        assert "Rates used" in page and "1.25" in page and "0.12" in page, path
    assert "0.12" in operator.get("/dashboard/operator/margin?reporting=EUR&format=csv").text
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))
    assert main(["price", "margin", "--reporting", "EUR", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["revenue"]["amount"] == "0.12"
    assert main(["invoice", "ageing", "--reporting", "EUR"]) == 0
    capsys.readouterr()
    assert main(["invoice", "revenue", "--reporting", "EUR", "--json"]) == 0
    (earned,) = json.loads(capsys.readouterr().out)
    assert (earned["currency"], earned["used"]) == ("EUR", 120_000_000_000)
    assert main(["invoice", "revenue", "--from", "2026-01-02", "--to", "2026-01-01"]) == 2
    assert main(["invoice", "revenue"]) == 0 and "0.15" in capsys.readouterr().out
    assert main(["invoice", "revenue", "--from", "soon"]) == 2
    billed = operator.get("/dashboard/operator/invoices?reporting=EUR").text
    assert "Billed" in billed and "Rates used" in billed


def test_rates_by_api_command_and_file(
    deployment: Deployment,
    operator: httpx.Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    body = {"day": "2026-01-30", "base": "GBP", "quote": "USD", "rate": "1.37"}
    assert operator.post(API, json=body).json()["rate"] == "1.37"
    assert operator.post(API, json={**body, "rate": "1.38"}).status_code == 409
    replaced = operator.post(API, json={**body, "rate": "1.38", "replace": True})
    assert replaced.status_code == 201 and replaced.json()["rate"] == "1.38"
    text = "day,base,quote,rate\n2026-01-29,GBP,USD,1.36\n"
    assert operator.post(f"{API}/import", json={"csv": text}).status_code == 201
    pasted = operator.post(PAGE, data={"act": "import", "csv": text.replace("-29", "-28")})
    assert pasted.status_code == 200 and "2026-01-28" in pasted.text
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", deployment.services.database.url)
    file = tmp_path / "rates.csv"
    file.write_text(text.replace("-29", "-27"))
    assert main(["price", "exchange-import", str(file), "--json"]) == 0
    assert main(["price", "exchange-rate", "CHF", "USD", "1.1", "--day", "2026-01-30"]) == 0
    capsys.readouterr()
    assert main(["price", "exchange-rates", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    pounds = {row["day"]: row["rate"] for row in rows if row["base"] == "GBP"}
    assert pounds == {
        "2026-01-30": "1.38",
        "2026-01-29": "1.36",
        "2026-01-28": "1.36",
        "2026-01-27": "1.36",
    }
    assert operator.get(API).json()["data"] == rows
    with deployment.services.database.read() as session:
        acts = session.query(AuditEntry).filter_by(action="exchange_rate.set").all()
    assert "GBP/USD 2026-01-28" in {row.target for row in acts}


def test_what_is_wrong_is_refused(deployment: Deployment, operator: httpx.Client) -> None:
    form = {"act": "save", "day": "2026-01-30", "base": "EUR", "quote": "USD", "rate": "much"}
    kept = operator.post(PAGE, data=form)
    assert kept.status_code == 400 and "not a number above 0" in kept.text
    assert 'value="much"' in kept.text
    wrong = operator.post(f"{API}/import", json={"csv": "day,base\n"})
    assert wrong.status_code == 400 and "does not begin" in wrong.text
    assert main(["price", "exchange-rate", "EUR", "USD", "0"]) == 2
    own = httpx.get(f"{deployment.url}{API}", headers=deployment.headers)
    assert own.status_code == 403
