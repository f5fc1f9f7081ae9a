"""What a budget and a wallet count at the exact borders of their windows, scopes and thresholds."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.ledger.tables import CreditGrant
from billing.notices import budgets, webhooks
from billing.notices.budgets import MoneyLimit, Window
from billing.notices.tables import Budget
from billing.notices.tables import OutboxMessage as Message
from billing.rating.unrated import UnratedUsage
from billing.usage.tables import Adjustment, HourlyUsage
from core.errors import BadRequest
from core.money import Money
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment

INSTANT, HOUR, DAY = timedelta(microseconds=1), timedelta(hours=1), timedelta(days=1)
NOTHING = dict.fromkeys((*QUANTITY_COLUMNS, *AMOUNT_COLUMNS), 0)


def used(session: Session, amount: int, at: datetime = START, **changes: Any) -> None:
    plain = {
        "tenant_id": "acme",
        "project_id": "proj",
        "key_id": "key",
        "currency": "USD",
        "kind": "generation",
        **dict.fromkeys(("model", "adapter", "usage_period_id", "bill_period_id"), ""),
        "price_version": f"{amount}",
    }
    session.add(HourlyUsage(at=at, **(plain | NOTHING | {"amount": amount} | changes)))


def corrected(session: Session, amount: int, at: datetime = START, **changes: Any) -> None:
    plain = {
        "tenant_id": "acme",
        "project_id": "proj",
        "currency": "USD",
        **dict.fromkeys(("usage_period_id", "bill_period_id", "transaction_id", "reason"), ""),
    }
    session.add(Adjustment(created_at=at, amount=amount, **(plain | changes)))


def made(session: Session, deployment: Deployment, **fields: Any) -> Budget:
    plain = {"tenant_id": "acme", "scope": "tenant", "scope_id": "acme", "cap": Money(1000)}
    return budgets.create(session, deployment.clock, **(plain | fields))


def limits(session: Session, at: datetime = START, **asked: str) -> list[MoneyLimit]:
    wanted = {"tenant_id": "acme", "project_id": "proj", "key_id": "key", **asked}
    return budgets.LimitReader(session, at, UnratedUsage()).of_key(**wanted)


@pytest.mark.parametrize(
    ("kind", "zone", "name", "starts_at", "ends_at"),
    [
        ("day", "UTC", "2026-03-01", "2026-03-01T00:00", "2026-03-02T00:00"),
        ("week", "UTC", "2026-02-23", "2026-02-23T00:00", "2026-03-02T00:00"),
        ("month", "UTC", "2026-03", "2026-03-01T00:00", "2026-04-01T00:00"),
        ("day", "America/New_York", "2026-02-28", "2026-02-28T05:00", "2026-03-01T05:00"),
        ("week", "America/New_York", "2026-02-23", "2026-02-23T05:00", "2026-03-02T05:00"),
        ("month", "America/New_York", "2026-02", "2026-02-01T05:00", "2026-03-01T05:00"),
    ],
)
def test_a_window_begins_and_ends_at_local_midnight(
    kind: str, zone: str, name: str, starts_at: str, ends_at: str
) -> None:
    found = budgets.window_of(kind, datetime(2026, 3, 1, 3, tzinfo=UTC), zone)
    bounds = (datetime.fromisoformat(f"{each}+00:00") for each in (starts_at, ends_at))
    assert found == Window(name, *bounds)


@pytest.mark.parametrize(
    ("scope", "scope_id", "spent"),
    [
        ("tenant", "acme", (0b1111 + 2**8, 2**9 + 2**10)),
        ("project", "proj", (0b0111 + 2**8, 2**9)),
        ("key", "key", (0b0011, 0)),
    ],
)
def test_a_window_counts_from_its_first_hour_to_before_its_end(
    lite: Deployment, session: Session, scope: str, scope_id: str, spent: tuple[int, int]
) -> None:
    """Each amount is a power of two, so that a sum says which ones are in it."""
    end = START + DAY
    used(session, 2**0)
    used(session, 2**1, end - HOUR)
    used(session, 2**2, key_id="other")
    used(session, 2**3, project_id="other", key_id="other")
    for left_out, changes in enumerate(
        ({"tenant_id": "beta"}, {"currency": "EUR"}, {"kind": "adjustment"}, {"at": end}), 4
    ):
        used(session, 2**left_out, **changes)  # type: ignore[arg-type]
    used(session, 2**20, START - HOUR)
    corrected(session, 2**8)
    corrected(session, -(2**9), end - INSTANT)
    corrected(session, -(2**10), project_id="other")
    for left_out, changes in enumerate(
        ({"tenant_id": "beta"}, {"currency": "EUR"}, {"at": end}), 11
    ):
        corrected(session, 2**left_out, **changes)  # type: ignore[arg-type]
        corrected(session, -(2**left_out), **changes)  # type: ignore[arg-type]
    corrected(session, 2**21, START - INSTANT)
    budget = made(session, lite, scope=scope, scope_id=scope_id, window="day")
    day = budgets.window_of("day", START, "UTC")
    assert budgets.spent_in(session, budget, day) == spent
    (limit,) = limits(session, START + 5 * HOUR)
    assert limit == MoneyLimit(
        f"{budget.id}:2026-01-01", 1000 + spent[1], spent[0], "USD", "budget"
    )
    (other,) = limits(session, START + DAY)  # of another window
    assert (other.key, other.spent_units) != (limit.key, limit.spent_units)


def test_a_budget_without_a_window_counts_everything(lite: Deployment, session: Session) -> None:
    used(session, 1, START - 900 * DAY)
    used(session, 2, START + 900 * DAY)
    corrected(session, 4, START - 900 * DAY)
    corrected(session, -8, START + 900 * DAY)
    budget = made(session, lite, window="total")
    expected = MoneyLimit(f"{budget.id}:total", 1008, 7, "USD", "budget")
    assert limits(session) == [expected]


def test_a_budget_limits_those_of_its_scope_from_its_making_to_before_its_end(
    lite: Deployment, session: Session
) -> None:
    wanted = [("tenant", "acme"), ("project", "proj"), ("key", "key")]
    ids = [made(session, lite, scope=scope, scope_id=owner).id for scope, owner in wanted]
    made(session, lite, tenant_id="beta", scope_id="beta")
    made(session, lite, hard=False)  # only alerts

    def found(at: datetime = START, **asked: str) -> list[int]:
        keys = [limit.key.partition(":")[0] for limit in limits(session, at, **asked)]
        assert keys == sorted(keys)
        return sorted(ids.index(key) for key in keys)

    assert found() == [0, 1, 2]
    assert found(project_id="other") == [0, 2]
    assert found(key_id="other") == [0, 1]
    assert found(START - INSTANT) == []
    session.get_one(Budget, ids[1]).ended_at = START + HOUR
    session.flush()
    assert found(START + HOUR - INSTANT) == [0, 1, 2]
    assert found(START + HOUR) == [0, 2]
    assert budgets.tenants_with_budgets(session) == ["acme", "beta"]
    session.execute(update(Budget).where(Budget.tenant_id == "acme").values(ended_at=START))
    assert budgets.tenants_with_budgets(session) == ["beta"]


def test_limits_that_hold_money_are_named_by_tenant_in_their_own_zones(
    lite: Deployment, session: Session
) -> None:
    lock_account(session, "acme").timezone = "Asia/Tokyo"
    lock_account(session, "acme").prepaid_only = True
    at = datetime(2026, 1, 1, 16, tzinfo=UTC)  # the next day in Tokyo
    day = made(session, lite, window="day").id
    made(session, lite, hard=False)
    ended = made(session, lite)
    ended.ended_at = START
    beta = made(session, lite, tenant_id="beta", scope_id="beta", window="day").id  # no account
    assert budgets.hard_limit_keys(session, at) == {
        "acme": [f"{day}:2026-01-02", "wallet:acme:USD"],
        "beta": [f"{beta}:2026-01-01"],
    }
    session.expire_all()
    (found,) = (each for each in limits(session, at) if each.key.startswith(day))
    assert found.key == f"{day}:2026-01-02"
    (found,) = limits(session, at, tenant_id="beta")
    assert found.key == f"{beta}:2026-01-01"


def test_a_wallet_has_what_was_granted_less_what_was_used_or_has_expired(
    lite: Deployment, session: Session
) -> None:
    for number, (granted, left, expires_at, changes) in enumerate(
        (
            (100, 60, None, {}),
            (1000, 900, START, {}),
            (10_000, 9_000, START + INSTANT, {}),
            (7, 7, None, {"currency": "EUR"}),
            (7, 7, None, {"tenant_id": "beta"}),
        )
    ):
        plain = {"tenant_id": "acme", "currency": "USD", "kind": "promo", "granted_at": START}
        session.add(
            CreditGrant(
                id=f"grant_{number}",
                reference=f"{number}",
                granted=granted,
                remaining=left,
                expires_at=expires_at,
                **(plain | changes),
            )
        )
    account = lock_account(session, "acme")
    found = budgets.wallet_limit(session, account, START, 5)
    spent = (40 + 100 + 1000) + 900 + 5
    assert found == MoneyLimit("wallet:acme:USD", 11_100, spent, "USD", "wallet")
    assert limits(session) == []
    account.prepaid_only = True
    (found,) = limits(session)
    assert (found.key, found.spent_units) == ("wallet:acme:USD", spent - 5)
    account.currency = "CHF"
    found = budgets.wallet_limit(session, account, START, 0)
    assert found == MoneyLimit("wallet:acme:CHF", 0, 0, "CHF", "wallet")


def test_a_budget_is_a_hard_one_of_a_month_unless_it_is_said(
    lite: Deployment, session: Session
) -> None:
    found = made(session, lite, cap=Money(1))
    assert (found.window, found.hard, found.thresholds) == ("month", True, [50, 80, 100])
    assert (found.name, found.webhooks, found.emails, found.cap) == ("", [], [], 1)
    found = made(session, lite, thresholds=(100, 7, 100), emails=("a@b.example",))
    assert (found.thresholds, found.emails) == ([7, 100], ["a@b.example"])
    assert made(session, lite, tenant_id="beta", cap=Money(1, "EUR")).currency == "EUR"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"scope": "moon"}, "scope is 'moon' and window is 'month'"),
        ({"window": "year"}, "scope is 'tenant' and window is 'year'"),
        ({"cap": Money(0)}, "must be above zero"),
        ({"cap": Money(1, "EUR")}, "The account is in USD, the budget in EUR"),
        ({"webhooks": ("ftp://example.com",)}, "not a valid webhook URL"),
    ],
)
def test_a_budget_that_would_hold_nothing_is_refused(
    lite: Deployment, session: Session, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason):
        made(session, lite, **fields)
    assert session.scalars(select(Budget)).all() == []


def test_an_alert_is_due_at_its_very_threshold_and_says_all_of_it(
    lite: Deployment, session: Session
) -> None:
    """A refund lowers what is spent. One address of the budget and one of the tenant are told."""
    session.get_one(BillingAccount, "acme").timezone = "Asia/Tokyo"
    at = datetime(2026, 1, 1, 16, tzinfo=UTC)
    lite.clock.set(at)
    url = "https://hooks.example.com/all"
    endpoint = webhooks.add(session, scope_of_operator("acme"), lite.clock, url, []).id
    fields = {"window": "day", "name": "team", "hard": False, "thresholds": (50, 51)}
    budget = made(session, lite, emails=("a@b.example",), **fields)
    silent = made(session, lite)
    made(session, lite, emails=("a@b.example",)).ended_at = at
    used(session, 600, at)
    corrected(session, -101, at)
    session.flush()
    assert budgets.send_alerts(session, lite.clock) == 0
    corrected(session, 1, at)
    session.flush()
    assert budgets.send_alerts(session, lite.clock, "beta") == 0
    assert budgets.send_alerts(session, lite.clock, "acme") == 2
    assert budgets.send_alerts(session, lite.clock) == 0
    told = {each.target: each for each in session.scalars(select(Message))}
    assert told.keys() == {url, "a@b.example"}
    assert told[url].endpoint_id == endpoint
    for message in told.values():
        assert message.subject == "Budget team has reached 50 % of its cap"
        assert message.payload == {
            "event": "budget.threshold",
            "budget_id": budget.id,
            "name": "team",
            "tenant_id": "acme",
            "scope": "tenant",
            "scope_id": "acme",
            "applies_to": "the organisation",
            "window": "2026-01-02",
            "threshold_percent": 50,
            "spent": "0.0000000005",
            "cap": "0.000000001",
            "currency": "USD",
            "hard": False,
        }
    assert silent.id != budget.id


def test_a_budget_without_a_name_is_called_by_its_id(lite: Deployment, session: Session) -> None:
    hooks = ("https://hooks.example.com/a",)
    budget = made(session, lite, webhooks=hooks, window="total", thresholds=(1,))
    beta = made(session, lite, tenant_id="beta", webhooks=hooks, thresholds=(1,))
    used(session, 10)
    used(session, 10, tenant_id="beta", at=lite.clock.now())
    session.flush()
    assert budgets.send_alerts(session, lite.clock) == 2
    found = session.scalars(select(Message.subject).order_by(Message.id)).all()
    assert sorted(found) == sorted(
        f"Budget {each.id} has reached 1 % of its cap" for each in (budget, beta)
    )
