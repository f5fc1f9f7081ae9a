"""Query parameters: unknown ones are refused on every route; those of the audit log work."""

import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from core.tenants.models import AuditEntry
from tests.gateway.admin.conftest import Town

# A provider's webhook and an issuer's callback may get any; probes have none that matter.
_OPEN = {"/webhooks/stripe", "/healthz", "/readyz", "/livez", "/metrics", "/ping", "/health"}


def test_an_unknown_query_parameter_is_refused_on_every_route(town: Town) -> None:
    paths = town.client.get("/openapi.json").json()["paths"]
    listed = [
        path
        for path, methods in paths.items()
        if "get" in methods and path.startswith(("/v1/", "/admin/")) and path not in _OPEN
    ]
    assert len(listed) > 60
    wrong = []
    for path in listed:
        filled = re.sub(r"\{[^}]+\}", "nothing", path)
        token = town.acme.keys["owner"]
        answer = town.call("GET", filled, token, params={"form": "2026-01-01"})
        if answer.status_code == 403:  # the operator's
            answer = town.as_operator("GET", filled, params={"form": "2026-01-01"})
        if answer.status_code != 400 or "form" not in answer.text:
            wrong.append((path, answer.status_code, answer.text[:80]))
    assert wrong == []


def test_the_audit_log_of_a_period_in_each_format(town: Town) -> None:
    owner, now = town.acme.keys["owner"], datetime.now(UTC)
    week = timedelta(days=7)
    with town.services.database.transaction() as session:
        for number, days in enumerate((20, 9, 8, 7, 1)):
            session.add(
                AuditEntry(
                    tenant_id=town.acme.id,
                    at=now - timedelta(days=days),
                    actor="mem_x",
                    action="test.audit",
                    target=f"=t{number}",
                    before=None,
                    after={"n": number},
                )
            )
    params = {
        "from": (now - 2 * week).isoformat(),
        "to": (now - week + timedelta(hours=1)).isoformat(),
        "action": "test.audit",
    }
    page = town.call("GET", "/admin/v1/audit", owner, params=params).json()
    assert [each["after"]["n"] for each in page["data"]] == [3, 2, 1]
    lines = town.call("GET", "/admin/v1/audit", owner, params=params | {"format": "jsonl"})
    assert [json.loads(each) for each in lines.text.splitlines()] == page["data"]
    table = town.call("GET", "/admin/v1/audit", owner, params=params | {"format": "csv"})
    assert table.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert [json.loads(each["after"])["n"] for each in rows] == [3, 2, 1]
    assert rows[0]["target"] == "'=t3", "a spreadsheet computes nothing"
    day = {"from": f"{now - 2 * week:%Y-%m-%d}", "to": f"{now - week:%Y-%m-%d}"}
    assert town.call("GET", "/admin/v1/audit", owner, params=params | day).status_code == 200


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"from": "yesterday"}, "from"),
        ({"from": "2026-02-01", "to": "2026-01-01"}, "from"),
        ({"format": "xml"}, "format"),
        ({"until": "2026-01-01"}, "until"),
    ],
)
def test_a_wrong_filter_of_the_audit_log_is_named(
    town: Town, params: dict[str, str], names: str
) -> None:
    answer = town.call("GET", "/admin/v1/audit", town.acme.keys["owner"], params=params)
    assert answer.status_code in (400, 422), answer.text
    assert names in answer.json()["error"]["param"], answer.text
