"""Subscriptions and add-ons at the moments in which they begin, change and end: the stored rows."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account, lock_account
from billing.subscriptions import add_ons, subscriptions
from billing.subscriptions.tables import AddOn, AddOnHolding, Plan, Subscription
from core.errors import BadRequest, Conflict, NotFound
from core.tenants.models import AuditEntry, Tenant
from tests.billing.conftest import START, Deployment

DAY, INSTANT = timedelta(days=1), timedelta(microseconds=1)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
Rows = list[tuple[datetime, datetime | None, int]]


@pytest.fixture
def offered(lite: Deployment, session: Session) -> Deployment:
    """Plans by the month and by the year, and two add-ons."""
    for name, fields in (
        ("month", {"limits_plan": "free"}),
        ("trial", {"trial_days": 10}),
        ("year", {"interval": "year"}),
        ("euro", {"currency": "EUR"}),
    ):
        plain = {"id": name, "name": name, "currency": "USD", "created_at": START}
        session.add(Plan(**(plain | fields)))  # type: ignore[arg-type]
    for name, interval in (("support", "month"), ("audit", "year")):
        add_ons.create(session, START, name, 10**12, currency="USD", interval=interval)
    session.flush()
    return lite


def subscribe(session: Session, plan: str, at: datetime, **fields: Any) -> Subscription:
    return subscriptions.subscribe(session, "acme", plan, at, **fields)


def held(session: Session) -> list[tuple[str, datetime, datetime | None, datetime | None]]:
    rows = session.scalars(select(Subscription).order_by(Subscription.starts_at))
    return [(each.plan_id, each.starts_at, each.ends_at, each.billed_from) for each in rows]


def have(session: Session, quantity: int, at: datetime, name: str = "support") -> AddOn:
    return add_ons.set_quantity(session, "acme", name, quantity, at)


def holdings(session: Session) -> Rows:
    rows = session.scalars(select(AddOnHolding).order_by(AddOnHolding.starts_at, AddOnHolding.id))
    return [(each.starts_at, each.ends_at, each.quantity) for each in rows]


def test_a_trial_is_of_the_first_subscription_and_ends_with_its_days(
    offered: Deployment, session: Session
) -> None:
    first = subscribe(session, "trial", START)
    assert (first.seats, first.overrides, first.fees_from) == (0, {}, START + 10 * DAY)
    subscribe(session, "month", START + 9 * DAY)
    subscribe(session, "trial", START + 10 * DAY)
    subscribe(session, "month", START + 11 * DAY)
    end = START + 10 * DAY
    assert held(session) == [
        ("trial", START, START + 9 * DAY, end),
        ("month", START + 9 * DAY, end, end),
        ("trial", end, START + 11 * DAY, None),
        ("month", START + 11 * DAY, None, None),
    ]
    with pytest.raises(Conflict, match="The latest subscription starts at 2026-01-12 00:00 UTC"):
        subscribe(session, "month", START + 11 * DAY)


def test_an_end_that_is_past_is_kept_by_the_next_subscription(
    offered: Deployment, session: Session
) -> None:
    subscribe(session, "month", START)
    assert subscriptions.cancel(session, "acme", START + DAY).ends_at == START + DAY
    subscribe(session, "month", START + 3 * DAY, seats=2, overrides={"base_fee": 5})
    ended = subscriptions.cancel(session, "acme", START + 4 * DAY, at_term_end=True)
    assert (ended.ends_at, ended.seats, ended.overrides) == (FEBRUARY, 2, {"base_fee": 5})
    assert session.get_one(Tenant, "acme").plan == "free"
    subscribe(session, "year", START + 5 * DAY)
    assert session.get_one(Tenant, "acme").plan == "standard"
    assert held(session) == [
        ("month", START, START + DAY, None),
        ("month", START + 3 * DAY, START + 5 * DAY, None),
        ("year", START + 5 * DAY, None, None),
    ]
    ((_, agreed), _) = subscriptions.read_subscriptions(session, ["acme"])["acme"][1:]
    assert (agreed.base_fee, agreed.name, agreed.limits_plan) == (5, "month", "free")
    assert session.get_one(Plan, "month").base_fee == 0
    actors = session.scalars(select(AuditEntry.actor).where(AuditEntry.action == "tenant.change"))
    assert set(actors) == {"billing"}


def test_a_subscription_is_cancelled_from_its_first_moment_to_before_its_last(
    offered: Deployment, session: Session
) -> None:
    subscribe(session, "month", START)
    subscriptions.cancel(session, "acme", START)
    for moment in (START - INSTANT, START, START + 9 * DAY):
        with pytest.raises(NotFound, match="has no subscription now"):
            subscriptions.cancel(session, "acme", moment)
    assert held(session) == [("month", START, START, None)]


def test_add_ons_end_with_the_subscription_and_those_that_ended_before_keep_their_end(
    offered: Deployment, session: Session
) -> None:
    subscribe(session, "month", START)
    have(session, 1, START + DAY)
    have(session, 2, START + 2 * DAY)
    have(session, 0, START + 3 * DAY)
    have(session, 3, START + 4 * DAY)
    subscriptions.cancel(session, "acme", START + 5 * DAY, at_term_end=True)
    later = holdings(session)
    assert later[-1] == (START + 4 * DAY, FEBRUARY, 3)
    subscriptions.cancel(session, "acme", START + 3 * DAY + INSTANT)
    assert holdings(session) == [
        (START + DAY, START + 2 * DAY, 1),
        (START + 2 * DAY, START + 3 * DAY, 2),
        (START + 4 * DAY, START + 4 * DAY, 3),
    ]


def test_an_add_on_changes_from_a_moment_on(offered: Deployment, session: Session) -> None:
    subscribe(session, "month", START)
    have(session, 1, START)
    have(session, 2, START)  # corrects what began at the same moment
    assert holdings(session) == [(START, None, 2)]
    have(session, 2, START + DAY)
    assert holdings(session) == [(START, None, 2)]
    have(session, 5, START + DAY)
    with pytest.raises(Conflict, match="latest change of support is at 2026-01-02 00:00 UTC"):
        have(session, 7, START + DAY - INSTANT)
    have(session, 0, START + 2 * DAY)
    have(session, 0, START + 3 * DAY)
    made = [(START, START + DAY, 2), (START + DAY, START + 2 * DAY, 5)]
    assert holdings(session) == made
    have(session, add_ons.MOST, START + 3 * DAY)
    assert holdings(session) == [*made, (START + 3 * DAY, None, 1_000_000)]
    shown = add_ons.of_tenant(session, "acme")
    assert [(each["add_on"], each["quantity"], each["interval"]) for each in shown] == [
        ("support", 2, "month"),
        ("support", 5, "month"),
        ("support", 1_000_000, "month"),
    ]
    assert [int(each["fee"]["units"]) for each in shown[:2]] == [2 * 10**12, 5 * 10**12]
    assert (shown[0]["from"], shown[0]["to"]) == (
        "2026-01-01T00:00:00+00:00",
        "2026-01-02T00:00:00+00:00",
    )
    assert shown[2]["to"] is None
    assert add_ons.of_tenant(session, "beta") == []


def test_an_add_on_that_does_not_fit_is_refused(offered: Deployment, session: Session) -> None:
    subscribe(session, "month", START)
    for quantity in (-1, 1_000_001):
        with pytest.raises(BadRequest, match=f"quantity is {quantity}; it must be 0 to 1,000,000"):
            have(session, quantity, START)
    with pytest.raises(Conflict, match="audit is by the year, the plan month by the month"):
        have(session, 1, START, "audit")
    assert have(session, 0, START, "audit").name == "audit"
    assert [each.name for each in add_ons.listed(session)] == ["audit", "support"]
    add_ons.create(session, START, "euro", 1, currency="EUR")
    with pytest.raises(BadRequest, match="Add-on euro is in EUR, the account in USD"):
        have(session, 1, START, "euro")
    assert add_ons.named(session, "euro").interval == "month"
    for fields in ({"fee": 0}, {"name": ""}, {"name": "n" * 121}, {"interval": "week"}):
        plain: dict[str, Any] = {"name": "x", "fee": 1, "interval": "year"}
        with pytest.raises(BadRequest, match="is not valid"):
            add_ons.create(session, START, currency="USD", **(plain | fields))
    assert holdings(session) == []


def test_a_plan_of_another_interval_waits_for_the_end_of_the_add_ons(
    offered: Deployment, session: Session
) -> None:
    subscribe(session, "month", START)
    have(session, 1, START)
    with pytest.raises(Conflict, match="support is by the month, the plan year by the year"):
        subscribe(session, "year", START + DAY)
    have(session, 0, START + 2 * DAY)
    with pytest.raises(Conflict, match="support is by the month"):
        subscribe(session, "year", START + 2 * DAY - INSTANT)
    subscribe(session, "year", START + 2 * DAY)
    with pytest.raises(BadRequest, match="Plan euro is in EUR, the account in USD"):
        subscribe(session, "euro", START + 3 * DAY)


def test_a_pause_ends_the_limits_and_a_resumption_brings_them_back(
    offered: Deployment, session: Session
) -> None:
    subscribe(session, "month", START, seats=4, overrides={"seat_fee": 3})
    until = START + 20 * DAY
    for wrong in (START + DAY, START + DAY - INSTANT):
        with pytest.raises(BadRequest, match="which is past"):
            subscriptions.pause(session, "acme", START + DAY, wrong)
    later = subscriptions.pause(session, "acme", START + DAY, until)
    assert (later.starts_at, later.seats, later.overrides) == (until, 4, {"seat_fee": 3})
    assert session.get_one(Tenant, "acme").plan == "standard"
    assert subscriptions.resume(session, "acme", until - INSTANT) is later
    assert session.get_one(Tenant, "acme").plan == "free"
    assert [row[:3] for row in held(session)] == [
        ("month", START, START + DAY),
        ("month", until - INSTANT, None),
    ]
    with pytest.raises(Conflict, match="No subscription is paused"):
        subscriptions.resume(session, "acme", until - INSTANT)


def test_nobody_without_a_subscription_is_resumed(offered: Deployment, session: Session) -> None:
    with pytest.raises(Conflict, match="No subscription is paused"):
        subscriptions.resume(session, "acme", START)
    assert subscriptions.tenants_with_limits(session) == []
    ensure_account(session, "beta", START)
    lock_account(session, "beta").limits_set = "free"
    subscribe(session, "year", START)
    session.flush()
    assert subscriptions.tenants_with_limits(session) == ["beta"]
    subscribe(session, "month", START + DAY)
    assert subscriptions.tenants_with_limits(session) == ["acme", "beta"]
    assert subscriptions.entitle(session, lock_account(session, "acme"), START + DAY) is False
    assert subscriptions.entitle(session, lock_account(session, "acme"), START) is True
    assert subscriptions.running_plan(session, "acme", START + DAY).name == "month"


def test_a_plan_is_created_with_amounts_from_zero_on(lite: Deployment, session: Session) -> None:
    fields = {"name": "zero", "currency": "USD", "limits_plan": None}
    amounts = dict.fromkeys(subscriptions.AMOUNTS, 0)
    made = subscriptions.create_plan(session, START, fields | amounts)
    assert (made.base_fee, made.created_at, made.interval) == (0, START, "month")
    for name in subscriptions.AMOUNTS:
        with pytest.raises(BadRequest, match=f"{name} is negative"):
            subscriptions.create_plan(session, START, fields | {"name": "low", name: -1})
    with pytest.raises(BadRequest, match="Unknown plan 'none'"):
        subscriptions.create_plan(session, START, fields | {"name": "x", "limits_plan": "none"})
    with pytest.raises(Conflict, match="A plan called 'zero' already exists"):
        subscriptions.create_plan(session, START, fields)
