"""What people read is grouped and named: an audit's amounts, and what the log of changes is about."""

import csv
import io
import re
from contextlib import closing

import httpx

from billing.audit.tables import AuditRun
from core.tenants import organisations
from core.tenants.keys import issue
from core.tenants.scope import scope_of_operator
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import Deployment


def test_amounts_of_an_audit_are_in_major_units_and_other_counts_have_a_reason(
    deployment: Deployment, operator: httpx.Client
) -> None:
    services = deployment.services
    counts = dict.fromkeys(("count", "input_tokens", "cached_tokens"), 0)
    steps = {
        "receipts": {**counts, "count": 75},
        "events": {**counts, "count": 70},
        "charges": {**counts, "count": 70, "units": 5},
        "ledger": {**counts, "output_tokens": 0, "waived_tokens": 0, "units": -1234567890123},
    }
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
    assert "1.234567890123<" in page and "0.000000000005<" in page and "0.00987654321<" in page
    assert "5 fewer than the step before: receipts of warm-ups" in page
    assert page.count("than the step before") == 1
    assert not re.search(
        r"(?<![.\d])\d{8,}", re.sub(r"<time[^>]*>|datetime=\S+", "", _tables(page))
    )
    file = operator.get("/dashboard/operator/reconciliation?format=csv").text
    assert "0.00987654321" in file and "9876543210" not in file


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
