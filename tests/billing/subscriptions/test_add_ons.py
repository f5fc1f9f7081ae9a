"""Add-ons beside plans, and limits that follow the billing plan; every amount is worked out by hand."""

import pytest
from sqlalchemy import select

from billing.invoicing import recognition
from billing.invoicing.tables import InvoiceLine
from billing.ledger.ledger import AccountKind, balance
from billing.subscriptions import add_ons, subscriptions
from billing.tasks import follow_subscriptions
from core.errors import BadRequest, Conflict, NotFound
from core.money import units_of
from core.queue import TaskContext
from core.settings import Settings
from core.tenants import plan_store
from core.tenants.models import AuditEntry, Tenant
from core.tenants.plans import PLANS
from tests.billing.conftest import Deployment
from tests.billing.subscriptions.test_plans import plan, subscribe
from tests.billing.subscriptions.test_subscription_terms import at, final


def offer(deployment: Deployment, fee: str, name: str = "support", interval: str = "month") -> None:
    with deployment.database.transaction() as session:
        now = deployment.clock.now()
        add_ons.create(session, now, name, units_of(fee), currency="USD", interval=interval)


def have(deployment: Deployment, quantity: int, name: str = "support") -> None:
    with deployment.database.transaction() as session:
        add_ons.set_quantity(session, "acme", name, quantity, deployment.clock.now())


def test_an_add_on_is_prorated_where_it_begins_and_ends(deployment: Deployment) -> None:
    plan(deployment, "pro", base_fee=units_of("31"))
    offer(deployment, "6.20")
    subscribe(deployment, "pro")
    at(deployment, 1, 11)
    have(deployment, 1)
    at(deployment, 1, 21)
    have(deployment, 3)
    # January has 31 days: 10 days of one unit at 0.20 a day, then 11 days of three.
    assert final(deployment, 2) == [
        [
            ("base_fee", "2026-01-01 2026-02-01", "31.00"),
            ("add_on", "2026-01-11 2026-01-21", "2.00"),
            ("add_on", "2026-01-21 2026-02-01", "6.60"),
        ]
    ]
    with deployment.database.read() as session:
        rows = session.scalars(select(InvoiceLine.description).order_by(InvoiceLine.id))
        one, three, _ = [row for row in rows if row.startswith("Add-on")]  # the last is February's
    assert "unit" not in one and ", 3 units" in three
    at(deployment, 2, 15)
    have(deployment, 0)
    # 14 of 28 days of three units.
    assert final(deployment, 3)[0][1:] == [("add_on", "2026-02-01 2026-02-15", "9.30")]
    assert final(deployment, 4) == [[("base_fee", "2026-03-01 2026-04-01", "31.00")]]


def test_in_advance_a_removed_add_on_returns_the_rest(lite: Deployment) -> None:
    plan(lite, "ahead", base_fee=units_of("28"), in_advance=True)
    offer(lite, "56")
    subscribe(lite, "ahead")
    have(lite, 1)
    first = final(lite, 2)
    # Of January the whole fee, as of February.
    assert first[0][2:] == [
        ("add_on", "2026-01-01 2026-02-01", "56.00"),
        ("add_on", "2026-02-01 2026-03-01", "56.00"),
    ]
    at(lite, 2, 15)
    have(lite, 0)
    assert final(lite, 3)[0] == [
        ("base_fee", "2026-03-01 2026-04-01", "28.00"),
        ("add_on", "2026-02-15 2026-03-01", "-28.00"),
    ]


def test_an_add_on_of_a_year_ends_with_the_year_of_the_plan(lite: Deployment) -> None:
    plan(lite, "year", base_fee=units_of("365"), interval="year", in_advance=True)
    offer(lite, "73", interval="year")
    subscribe(lite, "year")
    final(lite, 2)
    at(lite, 3, 15)  # 292 of 365 days are left: from day 73 on
    have(lite, 1)
    assert final(lite, 4) == [[("add_on", "2026-03-15 2027-01-01", "58.40")]]
    with lite.database.transaction() as session:
        recognition.recognise(session, lite.clock.now())
        # March has earned 17 of 292 days, and of the plan's year 90 of 365.
        earned = units_of("3.40") + units_of("90")
        revenue = -balance(session, "acme", AccountKind.REVENUE, "USD")
        assert revenue == earned
    at(lite, 6, 1)  # 151 days of the year are over; 214 of 365 return, of both
    with lite.database.transaction() as session:
        subscriptions.cancel(session, "acme", lite.clock.now())
    assert final(lite, 7) == [
        [
            ("base_fee", "2026-06-01 2027-01-01", "-214.00"),
            ("add_on", "2026-06-01 2027-01-01", "-42.80"),
        ]
    ]


def test_a_trial_and_a_pause_waive_add_ons_too(lite: Deployment) -> None:
    plan(lite, "pro", trial_days=10)
    offer(lite, "31")
    subscribe(lite, "pro")
    have(lite, 1)
    assert final(lite, 2) == [[("add_on", "2026-01-11 2026-02-01", "21.00")]]
    at(lite, 2, 15)
    with lite.database.transaction() as session:
        until = lite.clock.now().replace(month=3, day=1)
        subscriptions.pause(session, "acme", lite.clock.now(), until)
    assert final(lite, 3) == [[("add_on", "2026-02-01 2026-02-15", "15.50")]]
    assert final(lite, 4) == [[("add_on", "2026-03-01 2026-04-01", "31.00")]]


def test_what_does_not_fit_is_refused(lite: Deployment) -> None:
    offer(lite, "10")
    offer(lite, "100", "audit", "year")
    with pytest.raises(Conflict, match="already exists"):
        offer(lite, "10")
    with pytest.raises(NotFound, match="no subscription"):
        have(lite, 1)
    plan(lite, "pro")
    subscribe(lite, "pro")
    with pytest.raises(Conflict, match="by the year, the plan pro by the month"):
        have(lite, 1, "audit")
    with pytest.raises(NotFound, match="no add-on 'other'"):
        have(lite, 1, "other")
    with pytest.raises(BadRequest, match="quantity is -1"):
        have(lite, -1)
    with pytest.raises(BadRequest, match="not valid"):
        offer(lite, "0", "free")
    for name in ("", "n" * 121):
        with pytest.raises(BadRequest, match="not valid"):
            offer(lite, "1", name)
    for name in ("n", "n" * 120):
        offer(lite, "1", name)
    have(lite, 1)
    plan(lite, "year", interval="year")
    lite.clock.advance(days=1)
    with pytest.raises(Conflict, match="by the month, the plan year by the year"):
        subscribe(lite, "year")


def limits(deployment: Deployment) -> str:
    with deployment.database.read() as session:
        return session.get_one(Tenant, "acme").plan


def choose(deployment: Deployment, name: str) -> None:
    with deployment.database.transaction() as session:
        session.get_one(Tenant, "acme").plan = name


@pytest.fixture
def gold(lite: Deployment) -> Deployment:
    """With limits plans gold and silver, and billing plans of the same names."""
    from dataclasses import replace

    with lite.database.transaction() as session:
        for name in ("gold", "silver"):
            usual = replace(PLANS["standard"], name=name)
            plan_store.save(session, lite.clock, "operator", usual)
    plan(lite, "gold", limits_plan="gold")
    plan(lite, "silver", limits_plan="silver")
    plan(lite, "bare")
    return lite


def test_limits_follow_the_billing_plan_and_return_after_it(gold: Deployment) -> None:
    assert limits(gold) == "standard"
    subscribe(gold, "gold")
    assert limits(gold) == "gold"
    gold.clock.advance(days=1)
    subscribe(gold, "silver")
    assert limits(gold) == "silver"
    gold.clock.advance(days=1)
    subscribe(gold, "bare")
    assert limits(gold) == "standard"
    gold.clock.advance(days=1)
    subscribe(gold, "gold")
    with gold.database.transaction() as session:
        subscriptions.cancel(session, "acme", gold.clock.now(), at_term_end=True)
    assert limits(gold) == "gold"
    context = TaskContext(Settings(), gold.database, gold.clock)
    assert follow_subscriptions(context) == 0
    at(gold, 2, 1)
    assert follow_subscriptions(context) == 1 and limits(gold) == "standard"
    with gold.database.read() as session:
        changes = session.query(AuditEntry).filter_by(action="tenant.change").all()
        assert len(changes) == 5 and {each.actor for each in changes} == {"billing"}


def test_an_operator_s_own_choice_of_limits_stays(gold: Deployment) -> None:
    subscribe(gold, "gold")
    choose(gold, "silver")
    gold.clock.advance(days=1)
    subscribe(gold, "bare")
    assert limits(gold) == "silver"
    gold.clock.advance(days=1)
    subscribe(gold, "gold")
    assert limits(gold) == "gold", "a new plan with limits begins"
    choose(gold, "standard")
    gold.clock.advance(days=1)
    subscribe(gold, "silver")
    assert limits(gold) == "standard"
    choose(gold, "silver")  # what the subscription says: billing leads again
    with gold.database.transaction() as session:
        subscriptions.cancel(session, "acme", gold.clock.now())
    assert limits(gold) == "silver"


def test_a_plan_with_unknown_limits_is_refused(lite: Deployment) -> None:
    fields = {"name": "pro", "limits_plan": "platinum"}
    unknown = pytest.raises(BadRequest, match="Unknown plan 'platinum'")
    with lite.database.transaction() as session, unknown:
        subscriptions.create_plan(session, lite.clock.now(), fields)
