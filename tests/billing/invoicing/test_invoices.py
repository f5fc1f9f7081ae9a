"""Invoices: the sum of the usage, closed once, numbered without a gap, final for good."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from sqlalchemy import func, select, text

from billing.accounts.tables import BillingPeriod
from billing.audit import reconcile
from billing.invoicing import invoice_run, invoices, open_amounts, views
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger import credits, ledger
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import CreditGrant
from billing.payments import settlement
from billing.usage.tables import Charge
from core.errors import Conflict
from core.events import UsageKind
from core.money import Money, units_of, units_of_minor
from tests.billing.conftest import Deployment

MONTH = timedelta(days=31)


def clean(deployment: Deployment) -> None:
    with deployment.database.read() as session:
        report = reconcile.audit(session)
    assert report.clean, report.differences
    assert report.lost == report.duplicated == report.ledger_error == 0


def test_an_invoice_bills_the_usage_to_the_token_and_to_the_last_unit(
    deployment: Deployment,
) -> None:
    events = [deployment.event(input_tokens=1000 + n, output_tokens=7 * n) for n in range(40)]
    deployment.record(*events)
    result = invoice_run.run(deployment.database, deployment.clock, ["acme"])
    assert len(result.drafted) == 1
    with deployment.database.read() as session:
        invoice = invoices.get(session, result.drafted[0])
        lines = {line.component: line for line in invoices.lines_of(session, invoice.id)}
        assert lines["input"].quantity == sum(e.input_tokens - e.cached_tokens for e in events)
        assert lines["cached_input"].quantity == sum(e.cached_tokens for e in events)
        assert lines["output"].quantity == sum(e.output_tokens for e in events)
        assert lines["waived"].quantity == sum(e.waived_tokens for e in events)
        assert invoice.exact == session.scalar(select(func.sum(Charge.amount)))
        assert invoice.status == "draft"
    clean(deployment)


def test_an_invoice_sums_the_lines_of_each_project(deployment: Deployment) -> None:
    price = deployment.price({"output": "1", "input": "2"}, model="plain")
    used = {
        "model": "plain",
        "price_version": price.id,
        "input_tokens": 1_000_000,
        "cached_tokens": 0,
        "waived_tokens": 0,
    }
    for project_id, output in (("a", 1_000_000), ("a", 3_000_000), ("b", 500_000)):
        deployment.record(deployment.event(**used, project_id=project_id, output_tokens=output))
    (drafted,) = invoice_run.run(deployment.database, deployment.clock, ["acme"]).drafted
    with deployment.database.read() as session:
        shown = views.invoice_json(session, invoices.get(session, drafted))["by_project"]
    billed = {each["project_id"]: each["billed"]["amount"] for each in shown}
    exact = {each["project_id"]: Decimal(each["exact"]["amount"]) for each in shown}
    assert billed == {"a": "8", "b": "2.5"}
    assert exact == {"a": 8, "b": Decimal("2.5")}


def test_what_the_response_cache_answered_has_a_line_that_says_so(deployment: Deployment) -> None:
    deployment.price({"output": "1", "request": "0.01"})
    hit = {"kind": UsageKind.CACHE_HIT, "quantity": 1, "input_tokens": 0, "cached_tokens": 0}
    hits = [deployment.event(**hit, output_tokens=0, waived_tokens=0) for _ in range(3)]
    deployment.record(*hits, deployment.event())
    (drafted,) = invoice_run.run(deployment.database, deployment.clock, ["acme"]).drafted
    with deployment.database.read() as session:
        lines = {row.description: row.quantity for row in invoices.lines_of(session, drafted)}
    said = {text: quantity for text, quantity in lines.items() if "response cache" in text}
    assert said == {"demo, requests answered from the response cache": 3}
    assert len(lines) > 2


def test_a_second_run_changes_nothing(deployment: Deployment) -> None:
    deployment.record(deployment.event(input_tokens=1_000_000, cached_tokens=0))
    deployment.clock.advance(days=40)
    first = invoice_run.run(deployment.database, deployment.clock)
    assert len(first.finalised) == 1
    again = invoice_run.run(deployment.database, deployment.clock)
    assert (again.finalised, again.drafted) == ([], [])
    assert again.unchanged == first.finalised
    clean(deployment)


def test_a_final_invoice_is_owed_exactly_and_never_changes(deployment: Deployment) -> None:
    deployment.record(*[deployment.event(output_tokens=123_457) for _ in range(3)])
    deployment.clock.advance(days=40)
    (invoice_id,) = invoice_run.run(deployment.database, deployment.clock).finalised
    with deployment.database.read() as session:
        invoice = invoices.get(session, invoice_id)
        assert (invoice.status, invoice.label) == ("final", "TH-000001")
        owed = ledger.balance(session, "acme", AccountKind.RECEIVABLE, "USD")
        assert owed == units_of_minor(invoice.due_minor, "USD")
    for statement in (
        "update invoices set total_minor = 1",
        "update invoices set status = 'draft'",
        "delete from invoices",
        "delete from invoice_lines",
        "update invoice_lines set amount_minor = 0",
    ):
        with pytest.raises(Exception, match="final"), deployment.database.transaction() as session:
            session.execute(text(statement))
    clean(deployment)


@pytest.mark.parametrize("at_its_start", [False, True])
def test_a_period_is_not_closed_before_its_end_or_before_its_usage_is_rated(
    lite: Deployment, at_its_start: bool
) -> None:
    lite.record(lite.event())
    lite.rate()
    with lite.database.transaction() as session:
        period_id = session.scalars(select(BillingPeriod.id)).one()
        with pytest.raises(Conflict, match="cannot be closed before"):
            invoices.finalise(session, lite.clock, period_id)
        starts_at = session.get_one(BillingPeriod, period_id).starts_at
    lite.record(lite.event(occurred_at=starts_at) if at_its_start else lite.event())
    lite.clock.advance(days=40)
    with pytest.raises(Conflict, match="not rated"), lite.database.transaction() as session:
        invoices.finalise(session, lite.clock, period_id)


def test_late_usage_is_on_the_next_invoice_and_names_its_period(deployment: Deployment) -> None:
    deployment.record(deployment.event(output_tokens=100_000))
    late = deployment.event(output_tokens=500_000)
    deployment.clock.advance(days=40)
    invoice_run.run(deployment.database, deployment.clock)
    deployment.record(late)
    (draft_id,) = invoice_run.run(deployment.database, deployment.clock).drafted
    with deployment.database.read() as session:
        lines = invoices.lines_of(session, draft_id)
        assert {line.kind for line in lines} == {"late_usage"}
        output = next(line for line in lines if line.component == "output")
        assert output.quantity == 500_000
        assert "2026-01-01 to 2026-02-01" in output.description
        charge = session.get_one(Charge, late.request_id)
        assert charge.usage_period_id != charge.bill_period_id
    clean(deployment)


def test_credit_that_covers_all_leaves_nothing_due(deployment: Deployment) -> None:
    with deployment.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind="promo",
            money=Money(10**12),
            reference="welcome",
            at=deployment.clock.now(),
        )
    # Two lines of 0.4 cents each: rounded alone, the credit would leave a cent.
    deployment.record(deployment.event(input_tokens=26_667, cached_tokens=0, output_tokens=6_667))
    deployment.clock.advance(days=40)
    (invoice_id,) = invoice_run.run(deployment.database, deployment.clock).finalised
    with deployment.database.read() as session:
        invoice = invoices.get(session, invoice_id)
        assert (invoice.due_minor, invoice.status) == (0, "paid")
        assert ledger.balance(session, "acme", AccountKind.RECEIVABLE, "USD") == 0
    clean(deployment)


def test_paid_refunded_voided_written_off(deployment: Deployment) -> None:
    for _ in range(3):
        deployment.record(deployment.event(output_tokens=5_000_000))
        deployment.clock.advance(days=32)
        invoice_run.run(deployment.database, deployment.clock)
    now = deployment.clock.now()
    with deployment.database.transaction() as session:
        first, second, third = session.scalars(select(Invoice).order_by(Invoice.number))
        payment = settlement.begin_payment(
            session,
            tenant_id="acme",
            invoice_id=first.id,
            amount_minor=first.due_minor + 50,
            currency="USD",
            provider="manual",
            reference="wire-1",
            at=now,
        )
        for _ in range(2):
            settlement.succeed(session, payment, now)
        assert (first.status, first.paid_minor) == ("paid", first.due_minor)
        assert settlement.wallet(session, "acme", "USD") == units_of_minor(50, "USD")
        for _ in range(2):
            settlement.refund(session, payment, 100, "refund-1", now)
        assert settlement.wallet(session, "acme", "USD") == 0, "the overpayment goes back first"
        assert (first.status, open_amounts.open_minor(first)) == ("final", 50)
        settlement.void(session, second.id, now, "never agreed")
        settlement.write_off(session, third.id, now)
        assert (second.status, third.status) == ("void", "uncollectible")
        receivable = ledger.balance(session, "acme", AccountKind.RECEIVABLE, "USD")
        assert receivable == units_of_minor(50, "USD")
    clean(deployment)


def test_numbers_run_without_a_gap_over_tenants_and_failures(deployment: Deployment) -> None:
    for name in ("a", "b", "c", "d"):
        deployment.tenant(name)
        deployment.record(deployment.event(tenant_id=name, output_tokens=10_000))
    deployment.rate()
    deployment.clock.advance(days=40)
    with pytest.raises(RuntimeError), deployment.database.transaction() as session:
        period = session.scalars(
            select(BillingPeriod.id).where(BillingPeriod.tenant_id == "b")
        ).one()
        invoices.finalise(session, deployment.clock, period)
        raise RuntimeError("killed in the middle")
    invoice_run.run(deployment.database, deployment.clock)
    with deployment.database.read() as session:
        numbers = list(session.scalars(select(Invoice.number).order_by(Invoice.number)))
    assert numbers == [1, 2, 3, 4]
    clean(deployment)


def test_every_line_is_rounded_once_and_what_is_left_is_in_the_ledger(lite: Deployment) -> None:
    for n in range(7):
        lite.record(
            lite.event(project_id=f"p{n}", input_tokens=33_333 * n + 20, output_tokens=7_777)
        )
    lite.clock.advance(days=40)
    (invoice_id,) = invoice_run.run(lite.database, lite.clock).finalised
    with lite.database.read() as session:
        invoice = invoices.get(session, invoice_id)
        minor = session.scalar(select(func.sum(InvoiceLine.amount_minor)))
        assert invoice.total_minor == minor
        rounding = ledger.balance(session, "acme", AccountKind.ROUNDING, "USD")
        assert units_of_minor(invoice.due_minor, "USD") == invoice.exact - rounding
    clean(lite)


def test_the_audit_names_what_is_wrong(lite: Deployment) -> None:
    events = [lite.event() for _ in range(5)]
    lite.record(*events)
    lite.rate()
    with lite.database.transaction() as session:
        for table, column in (("charges", "output_amount = output_amount + 5"),):
            session.execute(text(f"drop trigger append_only_{table}_update"))
            session.execute(
                text(f"update {table} set {column}, amount = amount + 5 where request_id = :id"),
                {"id": events[2].request_id},
            )
        session.execute(text("drop trigger append_only_usage_events_delete"))
        session.execute(
            text("delete from usage_events where request_id = :id"), {"id": events[4].request_id}
        )
    with lite.database.read() as session:
        report = reconcile.audit(session)
    assert not report.clean
    assert report.lost == 1 and report.duplicated == 1  # gone from its batch; a charge alone
    assert report.ledger_error > 0
    named = {name for each in report.differences for name in each.request_ids}
    assert {events[2].request_id, events[4].request_id} <= named
    checks = {each.check for each in report.differences}
    assert {"charges/prices", "charges/ledger", "batches/events", "events/charges"} <= checks
    (posting,) = [each for each in report.differences if each.check == "charges/ledger"]
    with lite.database.read() as session:
        mine = text("select request_id from charges where transaction_id = :id")
        posted = session.scalars(mine, {"id": posting.message.split()[1]}).all()
    assert sorted(posting.request_ids) == sorted(posted) != []


def test_periods_start_at_midnight_of_the_tenants_zone(lite: Deployment) -> None:
    lite.tenant("berlin", timezone="Europe/Berlin")
    lite.clock.set(datetime(2026, 3, 31, 21, 59, 59, tzinfo=UTC))
    before = lite.event(tenant_id="berlin")
    lite.clock.set(datetime(2026, 3, 31, 22, 0, 0, tzinfo=UTC))
    after = lite.event(tenant_id="berlin")
    lite.record(before, after)
    lite.rate()
    with lite.database.read() as session:
        periods = {
            event.request_id: session.get_one(
                BillingPeriod, session.get_one(Charge, event.request_id).usage_period_id
            )
            for event in (before, after)
        }
    march, april = periods[before.request_id], periods[after.request_id]
    assert march.starts_at == datetime(2026, 2, 28, 23, tzinfo=UTC)  # winter time
    assert march.ends_at == april.starts_at == datetime(2026, 3, 31, 22, tzinfo=UTC)


@pytest.mark.parametrize("kind", [credits.PROMO, credits.PREPAID])
@pytest.mark.parametrize("final", [False, True])
def test_an_invoice_takes_no_credit_for_what_rating_has_paid_from_it(
    lite: Deployment, kind: str, final: bool
) -> None:
    """12.00 of 20.00 are used: rating draws them, and the invoice leaves the other 8.00."""
    with lite.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind=kind,
            money=Money(units_of("20")),
            reference="gift",
            at=lite.clock.now(),
        )
    lite.record(
        lite.event(input_tokens=0, cached_tokens=0, waived_tokens=0, output_tokens=20_000_000)
    )
    lite.clock.advance(days=40 if final else 1)
    result = invoice_run.run(lite.database, lite.clock, ["acme"], current=not final)
    (invoice_id,) = result.finalised if final else result.drafted
    with lite.database.read() as session:
        invoice = session.get_one(Invoice, invoice_id)
        paid = invoice.promo_minor + invoice.prepaid_minor
        assert (invoice.subtotal_minor, paid, invoice.due_minor) == (1200, 1200, 0)
        assert session.scalars(select(CreditGrant.remaining)).one() == units_of("8")
    clean(lite)
