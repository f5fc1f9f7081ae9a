"""Usage served elsewhere is billed once, at its own price, on the right invoice; amounts by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from billing.invoicing import invoice_run, invoices
from billing.invoicing.tables import InvoiceLine
from billing.usage.reported_usage import Report, Reported, report, report_own
from billing.usage.tables import Charge, UsageEventRow
from core.errors import BadRequest, Conflict
from core.events import UsageKind
from core.money import units_of
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment
from tests.billing.exports.test_exports import focus, rows
from tests.billing.invoicing.test_invoices import clean

JANUARY_20 = datetime(2026, 1, 20, 12, tzinfo=UTC)


def event(number: int, **changes: Any) -> Report:
    fields: dict[str, Any] = {
        "source": "scanner-7",
        "id": f"e{number}",
        "kind": UsageKind.GENERATION,
        "subject": "acme",
        "at": None,
        "model": "pages",
        "requests": 1,
    }
    return Report(**{**fields, **changes})


def send(deployment: Deployment, *reports: Report) -> Reported:
    with deployment.database.transaction() as session:
        return report(session, deployment.clock, reports, "operator")


def lines(deployment: Deployment, invoice_id: str) -> list[tuple[str, str, int, int]]:
    with deployment.database.read() as session:
        found = invoices.lines_of(session, invoice_id)
        return sorted((x.kind, x.component, x.quantity, x.amount_minor) for x in found)


def test_reported_usage_is_billed_once_and_late_usage_on_the_next_invoice(
    deployment: Deployment,
) -> None:
    deployment.price({"request": "0.01"}, model="pages")
    terms = {"input": "2.00", "cached_input": "0.50", "output": "8.00"}
    deployment.price(terms, model="render")
    deployment.clock.set(JANUARY_20 + timedelta(days=2))
    tokens = event(
        2,
        model="render",
        requests=None,
        input_tokens=1_000_000,
        cached_tokens=400_000,
        output_tokens=500_000,
    )
    both = event(1, requests=1234), tokens
    assert send(deployment, *both, both[0]) == Reported(stored=2, duplicates=1)
    assert send(deployment, *reversed(both)) == Reported(stored=0, duplicates=2)
    deployment.clock.set(datetime(2026, 2, 5, tzinfo=UTC))
    (january,) = invoice_run.run(deployment.database, deployment.clock, current=False).finalised
    # 1234 pages at 1 cent; 600,000 at $2, 400,000 at $0.50 and 500,000 at $8 a million.
    assert lines(deployment, january) == [
        ("usage", "cached_input", 400_000, 20),
        ("usage", "input", 600_000, 120),
        ("usage", "output", 500_000, 400),
        ("usage", "request", 1234, 1234),
    ]
    late = event(3, requests=200, at=JANUARY_20)
    assert send(deployment, late, both[1]) == Reported(stored=1, duplicates=1)
    send(deployment, event(4, requests=50))
    deployment.rate()
    deployment.clock.set(datetime(2026, 3, 5, tzinfo=UTC))
    (february,) = invoice_run.run(deployment.database, deployment.clock, current=False).finalised
    assert lines(deployment, february) == [
        ("late_usage", "request", 200, 200),
        ("usage", "request", 50, 50),
    ]
    with deployment.database.read() as session:
        minor = session.scalar(select(func.sum(InvoiceLine.amount_minor)))
        late_line = select(InvoiceLine.description).where(InvoiceLine.kind == "late_usage")
        assert "used 2026-01-01 to 2026-02-01" in str(session.scalar(late_line))
    assert minor == 1774 + 250
    exported = rows(deployment, "usage", None)
    assert {row["client_request_id"]: row["quantity"] for row in exported} == {
        "e1": 1234,
        "e2": 1,
        "e3": 200,
        "e4": 50,
    }
    assert {(row["settled_by"], row["status"]) for row in exported} == {("reported", 200)}
    assert sum(row["amount"] for row in rows(deployment, "charges", None)) == units_of("20.24")
    assert sum(row["BilledCost"] for row in focus(deployment)) == units_of("20.24")
    clean(deployment)


def test_the_price_of_the_time_of_use_applies(deployment: Deployment) -> None:
    start = deployment.clock.now()
    deployment.price({"request": "0.01"}, model="pages", effective_from=start)
    deployment.price({"request": "0.03"}, model="pages", effective_from=start + timedelta(days=10))
    deployment.clock.advance(days=12)
    before = event(1, at=start + timedelta(days=9))
    send(deployment, before, event(2), event(3, source="scanner-8", id="e1"))
    deployment.rate()
    with deployment.database.read() as session:
        amounts = session.scalars(select(Charge.amount).order_by(Charge.amount)).all()
    assert list(amounts) == [units_of("0.01"), units_of("0.03"), units_of("0.03")]


WRONG = (
    ({"model": "pagse"}, "no price of 'pagse' in USD is in force on 2026-01-21", "data.model"),
    ({"at": JANUARY_20 - timedelta(days=60)}, "is in force on 2025-11-21", "data.model"),
    ({"at": JANUARY_20 + timedelta(days=2)}, "is in the future", "time"),
    ({"subject": "acne"}, "there is no tenant 'acne'", "subject"),
    ({"project": "ghost"}, "the tenant has no project 'ghost'", "data.project"),
    ({"output_tokens": 5}, "has no rate for output", "data"),
    ({"requests": 0}, "it states no quantity", "data"),
    ({"seconds": 3}, "generation has no seconds", "data"),
    ({"input_tokens": 1, "cached_tokens": 2}, "2 cached_tokens exceed 1 input_tokens", "data"),
    ({"kind": UsageKind.GPU_SECONDS, "requests": None, "seconds": 3}, "for gpu_second", "data"),
)


@pytest.mark.parametrize(("changes", "problem", "param"), WRONG)
def test_what_cannot_be_billed_is_refused_by_name_with_its_whole_call(
    deployment: Deployment, changes: dict[str, Any], problem: str, param: str
) -> None:
    deployment.price({"request": "0.01"}, model="pages")
    deployment.price({"request": "1"}, model="*")  # would hide a misspelt name
    deployment.clock.set(JANUARY_20 + timedelta(days=1))
    with pytest.raises(BadRequest, match="Event 'e2' of 'scanner-7'") as refused:
        send(deployment, event(1), event(2, **changes))
    assert problem in refused.value.message and refused.value.param == param
    with deployment.database.read() as session:
        assert session.scalar(select(func.count()).select_from(UsageEventRow)) == 0
    assert send(deployment, event(1)) == Reported(stored=1, duplicates=0)


def test_an_id_that_comes_with_other_contents_is_refused(deployment: Deployment) -> None:
    deployment.price({"request": "0.01"}, model="pages")
    with pytest.raises(Conflict, match="Event 'e1' of 'scanner-7' was sent before"):
        send(deployment, event(1), event(1, requests=2))
    send(deployment, event(1))
    with pytest.raises(Conflict, match="Give every event an id of its own"):
        send(deployment, event(2), event(1, requests=2))
    deployment.rate()
    with deployment.database.read() as session:
        assert list(session.scalars(select(Charge.requests))) == [1]


@pytest.mark.parametrize(
    "verb", ["delete from reported_events", "update reported_events set digest = 'x'"]
)
def test_what_was_reported_does_not_change(deployment: Deployment, verb: str) -> None:
    deployment.price({"request": "0.01"}, model="pages")
    send(deployment, event(1))
    with (
        pytest.raises(DBAPIError, match="append-only"),
        deployment.database.transaction() as session,
    ):
        session.execute(text(verb))
    assert send(deployment, event(1)) == Reported(stored=0, duplicates=1)


def test_the_ids_of_an_organisation_block_nobody_elses(deployment: Deployment) -> None:
    deployment.price({"request": "0.01"}, model="pages")
    deployment.tenant("rival")

    def _own(name: str, *reports: Report) -> Reported:
        scope = scope_of_operator(name, "mem_1")
        with deployment.database.transaction() as session:
            return report_own(session, scope, deployment.clock, reports)

    assert _own("rival", event(1, subject="", requests=9)) == Reported(1, 0)
    assert _own("acme", event(1, requests=2)) == Reported(1, 0)
    assert send(deployment, event(1, requests=3)) == Reported(1, 0)
    assert _own("acme", event(1, requests=2)) == Reported(0, 1)
    with pytest.raises(BadRequest, match="there is no tenant 'acme'"):
        _own("rival", event(2, subject="acme"))
    deployment.rate()
    with deployment.database.read() as session:
        found = select(Charge.tenant_id, func.sum(Charge.requests)).group_by(Charge.tenant_id)
        assert dict(session.execute(found).all()) == {"acme": 5, "rival": 9}
    clean(deployment)
