"""The checklist of a month's end: each check fails for its own fault, and a signature stays."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.adjustments.money_acts import FourEyes
from billing.audit.tables import AuditRun
from billing.invoicing import invoice_run, recognition
from billing.ledger import credits
from billing.reports import month_end
from billing.reports.tables import SignedMonth
from billing.subscriptions import subscriptions
from billing.usage.tables import ParkedEvent
from core.errors import BadRequest, Conflict
from core.money import Money, units_of
from core.tenants.models import AuditEntry
from tests.billing.conftest import Deployment
from tests.billing.payments.test_settlement import Customer
from tests.billing.subscriptions.test_plans import plan

MONTH = "2026-01"
JANUARY = datetime(2026, 1, 1, tzinfo=UTC)


def bad(deployment: Deployment, month: str = MONTH) -> list[str]:
    with deployment.database.read() as session:
        checks = month_end.checklist(session, deployment.clock.now(), month)
    return [each.name for each in checks if each.state == "bad"]


def audited(deployment: Deployment, clean: bool = True) -> None:
    with deployment.database.transaction() as session:
        session.add(AuditRun(at=deployment.clock.now(), clean=clean, report={}))


@pytest.fixture
def ready(deployment: Deployment) -> Deployment:
    """January of one tenant, invoiced with 12.00 on February 10, and audited."""
    Customer(deployment).invoiced()
    audited(deployment)
    now = deployment.clock.now()
    deployment.clock.advance(hours=26)  # one a day, and time to run it
    assert bad(deployment) == []
    deployment.clock.set(now)
    return deployment


def _park(made: Deployment) -> None:
    with made.database.transaction() as session:
        session.add(
            ParkedEvent(
                request_id="req_x",
                tenant_id="acme",
                code="invalid",
                reason="none",
                payload={},
                parked_at=made.clock.now() - timedelta(days=20),
            )
        )


def _unrated(made: Deployment) -> None:
    now = made.clock.now()
    made.clock.set(now - timedelta(days=20))
    made.record(made.event())
    made.clock.set(now)


def _draft(made: Deployment) -> None:
    made.tenant("zeta")
    now = made.clock.now()
    made.clock.set(now - timedelta(days=30))
    tokens = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 20_000_000}
    made.record(made.event(tenant_id="zeta", **tokens))
    made.rate()
    invoice_run.run(made.database, made.clock, ["zeta"])
    made.clock.set(now)


def _act(made: Deployment) -> None:
    asked = ActRequest(Kind.GRANT, "acme", "g", units_of("5"))
    now = made.clock.now()
    made.clock.set(now - timedelta(days=20))
    with made.database.transaction() as session:
        money_acts.submit(session, made.clock, asked, "operator:ann", FourEyes(0))
    made.clock.set(now)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (_park, "No usage is parked"),
        (_unrated, "Usage is rated"),
        (_draft, "Invoices are final"),
        (_act, "Acts on money are decided"),
        (lambda made: audited(made, clean=False), "The audit is clean"),
        (lambda made: made.clock.advance(hours=26, seconds=1), "The audit is clean"),
    ],
)
def test_a_fault_prevents_the_signature_by_its_name(
    ready: Deployment, fault: Callable[[Deployment], None], name: str
) -> None:
    fault(ready)
    assert bad(ready) == [name]
    with (
        pytest.raises(Conflict, match=f"{MONTH} cannot be signed off: {name}"),
        ready.database.transaction() as session,
    ):
        month_end.sign(session, ready.clock, MONTH, "operator:ann")


def test_a_month_that_has_not_ended_is_not_signed(ready: Deployment) -> None:
    assert "The month is over" in bad(ready, "2026-02")
    with pytest.raises(BadRequest):
        month_end.known_month("2026-03", ready.clock.now())


def test_two_persons_sign_and_a_later_entry_in_the_month_shows(ready: Deployment) -> None:
    for who in ("operator:ann", "operator:bob"):
        with ready.database.transaction() as session:
            month_end.sign(session, ready.clock, MONTH, who, "as agreed")
    with ready.database.transaction() as session, pytest.raises(Conflict, match="already"):
        month_end.sign(session, ready.clock, MONTH, "operator:ann")
    with ready.database.read() as session:
        signed = month_end.signatures(session, MONTH)
        assert [each.signed_by for each in signed] == ["operator:ann", "operator:bob"]
        # On January 31 the tenant has used 12.00, which is receivable and revenue.
        twelve = str(units_of("12"))
        assert signed[0].balances == {"USD": {"receivable": twelve, "revenue": f"-{twelve}"}}
        assert not any(month_end.changed(session, each) for each in signed)
        logged = session.scalars(select(AuditEntry).where(AuditEntry.action == "month.sign")).all()
        assert [each.actor for each in logged] == ["operator:ann", "operator:bob"]
    with ready.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind="promo",
            money=Money(units_of("1")),
            reference="late",
            at=ready.clock.now() - timedelta(days=20),
        )
    with ready.database.read() as session:
        assert all(month_end.changed(session, each) for each in month_end.signatures(session))
        assert session.scalar(select(func.count()).select_from(SignedMonth)) == 2


def test_fees_billed_ahead_that_are_not_earned_prevent_the_signature(ready: Deployment) -> None:
    plan(ready, "year", base_fee=units_of("365"), interval="year", in_advance=True)
    with ready.database.transaction() as session:
        subscriptions.subscribe(session, "acme", "year", JANUARY)
    ready.clock.advance(days=24)  # to March 6
    invoice_run.run(ready.database, ready.clock)
    audited(ready)
    assert bad(ready, "2026-02") == ["Fees billed ahead are earned"]
    with ready.database.transaction() as session:
        recognition.recognise(session, ready.clock.now())
    assert bad(ready, "2026-02") == []


def test_an_act_of_the_next_months_first_moment_is_not_the_months(ready: Deployment) -> None:
    now = ready.clock.now()
    asked = ActRequest(Kind.GRANT, "acme", "g", units_of("5"))
    ready.clock.set(JANUARY + timedelta(days=31))
    with ready.database.transaction() as session:
        money_acts.submit(session, ready.clock, asked, "operator:ann", FourEyes(0))
    ready.clock.set(now)
    assert bad(ready) == []


def test_a_month_is_known_from_its_first_moment(ready: Deployment) -> None:
    february = JANUARY + timedelta(days=31)
    assert month_end.known_month("2026-02", february) == "2026-02"
    with pytest.raises(BadRequest, match="has not begun"):
        month_end.known_month("2026-02", february - timedelta(microseconds=1))


def test_a_signature_is_returned_and_described(ready: Deployment) -> None:
    with ready.database.transaction() as session:
        signed = month_end.sign(session, ready.clock, MONTH, "operator:ann", "as agreed")
        shown = month_end.describe(session, signed)
    names = ("month", "signed_by", "note", "changed", "signed_at")
    expected = (MONTH, "operator:ann", "as agreed", False, ready.clock.now().isoformat())
    assert tuple(shown[name] for name in names) == expected
    assert [check["state"] for check in shown["checklist"]].count("bad") == 0


def test_a_month_without_any_audit_is_not_signed(deployment: Deployment) -> None:
    Customer(deployment).invoiced()
    assert bad(deployment) == ["The audit is clean"]
    with deployment.database.read() as session:
        checks = month_end.checklist(session, deployment.clock.now(), MONTH)
    (found,) = [each for each in checks if each.name == "The audit is clean"]
    assert (found.summary, found.path) == ("no audit has run", "/operator/reconciliation")
