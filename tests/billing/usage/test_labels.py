"""Usage by labels: bounded sets, totals that agree with every other grouping, and budgets."""

import random
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import select

from billing.notices import budgets
from billing.pricing.prices import load_price_book
from billing.rating.unrated import UnratedUsage
from billing.usage import label_rollups, label_sets, service_rollups
from billing.usage.label_buckets import buckets_by_label
from billing.usage.tables import Charge, HourlyLabelUsage, UsageEventRow
from billing.usage.usage_buckets import BucketQuery, Width
from core import labels
from core.errors import BadRequest
from core.events import UsageEvent
from core.money import Money
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment

ACME = scope_of_operator("acme")
SETS = (None, "team=search", "feature=chat,team=search", "feature=chat", "team=ads")


def _fill(lite: Deployment, count: int = 60) -> list[UsageEvent]:
    draw = random.Random(3)
    lite.clock.advance(days=3)
    made = []
    for _ in range(count):
        at = START + timedelta(minutes=draw.randrange(3 * 1440))
        made.append(
            lite.event(
                occurred_at=at,
                finished_at=at,
                labels=draw.choice(SETS),
                key_id=draw.choice(("key", "key2")),
                output_tokens=draw.randrange(1, 300),
            )
        )
    lite.record(*made)
    lite.rate()
    service_rollups.sum_all(lite.database, lite.clock)
    return made


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
@pytest.mark.parametrize("others", [(), ("key_id",), ("end_user",)])
def test_groups_by_label_are_the_sums_of_the_events(
    lite: Deployment, others: tuple[str, ...], zone: str
) -> None:
    made = _fill(lite)
    end = START + timedelta(days=4)
    asked = (*others, "label:team")
    query = BucketQuery(START - timedelta(days=1), end, Width.DAY, asked, 10, zone=zone)
    with lite.database.read() as session:
        page = buckets_by_label(session, ACME, query)
        rows = session.execute(select(Charge.request_id, Charge.amount))
        amounts = {row[0]: row[1] for row in rows}
    found: Counter[tuple[str | None, ...]] = Counter()
    money: Counter[tuple[str | None, ...]] = Counter()
    for bucket in page.buckets:
        for row in bucket.rows:
            group = tuple(row.group[name] or None for name in asked)
            found[group] += row.counts["output_tokens"]
            money[group] += row.amounts["amount"]
    wanted: Counter[tuple[str | None, ...]] = Counter()
    charged: Counter[tuple[str | None, ...]] = Counter()
    for event in made:
        group = (
            *(getattr(event, name) for name in others),
            labels.read(event.labels).get("team"),
        )
        wanted[group] += event.output_tokens
        charged[group] += amounts[event.request_id]
    assert found == wanted
    assert money == charged


def test_a_filter_has_any_value_of_a_name_and_all_names(lite: Deployment) -> None:
    made = _fill(lite)
    query = BucketQuery(START, START + timedelta(days=3), Width.DAY, (), 10)
    asked = ("team=search", "team=ads", "feature=chat")
    with lite.database.read() as session:
        page = buckets_by_label(session, ACME, query, asked)
    found = sum(row.counts["output_tokens"] for bucket in page.buckets for row in bucket.rows)
    both = [each for each in made if each.labels == "feature=chat,team=search"]
    assert found == sum(each.output_tokens for each in both) > 0


def test_values_beyond_the_bound_are_counted_as_other(
    lite: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_sets, "MOST_VALUES", 3)
    for number in range(6):
        lite.record(lite.event(labels=f"team=t{number}"))
    with lite.database.read() as session:
        stored = Counter(session.scalars(select(UsageEventRow.labels)))
        known = label_sets.known(session, ACME)
    assert stored == {"team=t0": 1, "team=t1": 1, "team=t2": 1, "team=other": 3}
    assert known == ["team=other", "team=t0", "team=t1", "team=t2"]


def test_sets_beyond_the_bound_are_counted_as_other(
    lite: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_sets, "MOST_SETS", 2)
    lite.record(*(lite.event(labels=f"a=x{n % 3},b=y{n}") for n in range(4)))
    with lite.database.read() as session:
        assert len(label_sets.known(session, ACME)) == 3
        stored = Counter(session.scalars(select(UsageEventRow.labels)))
    assert stored["a=other,b=other"] == 2


def test_a_rebuild_changes_nothing(lite: Deployment) -> None:
    _fill(lite)

    def _rows() -> list[tuple[object, ...]]:
        with lite.database.read() as session:
            columns = HourlyLabelUsage.__table__.columns
            return sorted(tuple(map(str, row)) for row in session.execute(select(*columns)))

    before = _rows()
    assert before
    with lite.database.transaction() as session:
        service_rollups.rebuild(session, lite.clock)
    assert _rows() == before


@pytest.mark.parametrize("stage", ["stored", "rated", "summed"])
def test_a_budget_of_a_label_counts_its_usage_at_every_stage(lite: Deployment, stage: str) -> None:
    with lite.database.transaction() as session:
        cap = Money(10**12, "USD")
        shared = {"tenant_id": "acme", "scope": "label", "cap": cap}
        budgets.create(session, lite.clock, scope_id="team=search", **shared)  # type: ignore[arg-type]
    lite.record(
        lite.event(labels="feature=chat,team=search"),
        lite.event(labels="team=searches"),
        lite.event(),
    )
    if stage != "stored":
        lite.rate()
    if stage == "summed":
        service_rollups.sum_all(lite.database, lite.clock)
    unrated, at = UnratedUsage(), lite.clock.now()
    with lite.database.read() as session:
        unrated.refresh(session, frozenset(("acme",)), load_price_book(session))
        reader = budgets.LimitReader(session, at, unrated)
        (limit,) = reader.of_labels("acme", "team=search,z=1")
        assert reader.of_labels("acme", "team=ads") == []
        assert reader.of_labels("acme", None) == []
        assert reader.of_key("acme", "proj", "key") == []
    lite.rate()
    with lite.database.read() as session:
        one = session.scalars(select(Charge.amount)).first()
    assert limit.spent_units == one


def test_an_hour_with_the_border_of_a_window_inside_is_read_from_its_events(
    lite: Deployment,
) -> None:
    owner = {"tenant_id": "acme", "currency": "USD"}
    at = START + timedelta(hours=5, minutes=10)
    lite.clock.advance(days=1)
    lite.record(*(lite.event(labels="a=b", occurred_at=at + timedelta(minutes=n)) for n in (0, 30)))
    lite.rate()
    service_rollups.sum_all(lite.database, lite.clock)
    with lite.database.read() as session:
        half = START + timedelta(hours=5, minutes=30)
        whole = label_rollups.spent(session, "a=b", owner, None, None)
        first = label_rollups.spent(session, "a=b", owner, START, half)
        second = label_rollups.spent(session, "a=b", owner, half, START + timedelta(days=1))
    assert first == second == whole // 2 > 0


@pytest.mark.parametrize("wrong", ["team", "Team=x", "team=", "team=a,b", "team= x"])
def test_a_wrong_label_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequest, match="label"):
        labels.check_label(wrong, "labels")
