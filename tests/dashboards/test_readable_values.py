"""What people read is grouped and named: an audit's amounts, and what the log of changes is about."""

import csv
import io
import re
from contextlib import closing

import httpx

from billing.models import AuditRun
from core.tenants import organisations
from core.tenants.keys import issue
from core.tenants.scope import scope_of_operator
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import Deployment

SPACE = "\u202f"  # between groups of three digits


def test_picounits_of_an_audit_are_grouped_on_the_page_and_plain_in_the_file(
    deployment: Deployment, operator: httpx.Client
) -> None:
    services = deployment.services
    counts = dict.fromkeys(("count", "input_tokens", "cached_tokens"), 0)
    steps = {"ledger": {**counts, "output_tokens": 0, "waived_tokens": 0, "units": -1234567890123}}
    difference = {
        "check": "charges and ledger",
        "kind": "lost",
        "message": "one is missing",
        "count": 1,
        "units": 9876543210,
        "request_ids": ["req_1"],
    }
    report = {
        "lost": 1,
        "duplicated": 0,
        "ledger_error": "0.00987654321",
        "pending": 0,
        "parked": 0,
        "steps": steps,
        "differences": [difference],
    }
    with services.database.transaction() as session:
        session.add(AuditRun(at=services.clock.now(), clean=False, report=report))
    page = operator.get("/dashboard/operator/reconciliation").text
    assert f"1{SPACE}234{SPACE}567{SPACE}890{SPACE}123<" in page
    assert f"9{SPACE}876{SPACE}543{SPACE}210<" in page
    assert not re.search(
        r"(?<![.\d])\d{8,}", re.sub(r"<time[^>]*>|datetime=\S+", "", _tables(page))
    )
    file = operator.get("/dashboard/operator/reconciliation?format=csv").text
    assert "9876543210" in file


def _tables(page: str) -> str:
    return "".join(re.findall(r"<table>.*?</table>", page, re.DOTALL))


def test_the_log_of_changes_names_what_was_changed(deployment: Deployment) -> None:
    services = deployment.services
    scope = scope_of_operator(deployment.tenant_id)
    with services.database.transaction() as session:
        project = organisations.create_project(session, scope, services.clock, name="billing-bots")
        key = issue(
            session,
            scope,
            services.clock,
            project_id=project.id,
            name="night shift",
            role="developer",
        )
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        log = owner.get("/dashboard/team").text
        log = log[log.index("Latest changes") :]
        row = next(row for row in log.split("<tr>") if "night shift" in row)
        assert "project billing-bots" in row, row
        assert "[]" not in row and "{}" not in row
        assert not re.search(r"\b(key|proj|mem|lora)_[0-9a-z]{20}", log)
        rows = list(csv.DictReader(io.StringIO(owner.get("/dashboard/team?format=csv").text)))
        assert ("night shift", key.id) in [(row["Target"], row["Target id"]) for row in rows]
