"""A month is signed off on one page, over the API and by command, by a person."""

import json
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from billing.audit.tables import AuditRun
from billing.reports import month_end
from core.tenants import operators
from gateway.cli.main import main
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment

PATH = "/dashboard/operator/month-end"


def test_a_month_is_signed_after_its_checklist(
    deployment: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    services = deployment.services
    month = month_end.last_month(services.clock.now())
    with closing(browser(deployment, services.operator_token)) as client:
        page = client.get(PATH).text
        assert "no audit has run" in page and ">Sign off<" not in page
        sent = {"act": "sign", "month": month, "confirm": month}
        refused = client.post(PATH, data=sent)
        assert refused.status_code == 409 and "cannot be signed off" in refused.text
        with services.database.transaction() as session:
            session.add(AuditRun(at=services.clock.now(), clean=True, report={}))
        assert client.post(PATH, data=sent | {"confirm": "x"}).status_code == 400
        assert "The month is signed off." in client.post(PATH, data=sent).text
        assert client.get(f"{PATH}?month=2999-01").status_code == 400
    with services.database.transaction() as session:
        ann = operators.add(session, services.clock, "operator", "ann", "accountant")[1]
    url = f"{deployment.url}/admin/v1/months/{month}"
    headers = {"authorization": f"Bearer {ann}"}
    assert httpx.post(f"{url}/signatures", json={}, headers=headers).status_code == 201
    shown = httpx.get(url, headers=headers).json()
    assert [each["signed_by"] for each in shown["signatures"]] == ["operator", "operator:ann"]
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", services.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert main(["money", "month-end", month, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["signatures"]) == 2
    assert main(["money", "month-end", month, "--sign"]) == 2
    assert "has signed" in capsys.readouterr().err
