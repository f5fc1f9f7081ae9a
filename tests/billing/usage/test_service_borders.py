"""Service roll-ups on both sides of every border: of classes, outcomes and days; whole rows."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, select, update

from billing.usage import rollups, service_rollups
from billing.usage.service_rollups import percentile
from billing.usage.tables import (
    FIRST_COLUMNS,
    SPEED_COLUMNS,
    Charge,
    DailyEngineTime,
    DailyService,
    DailyUsage,
    HourlyService,
    HourlyUsage,
    UsageBatch,
    UsageRetention,
)
from tests.billing.conftest import START, Deployment


def _summed(lite: Deployment, *changes: dict[str, Any]) -> None:
    lite.record(*(lite.event(**each) for each in changes))
    lite.rate()
    service_rollups.sum_all(lite.database, lite.clock)


def _rows(lite: Deployment, table: Any = DailyService) -> list[Any]:
    with lite.database.read() as session:
        keys = list(table.__table__.primary_key)
        return list(session.scalars(select(table).order_by(*keys)))


def _classes(row: Any, columns: tuple[str, ...]) -> list[int]:
    return [getattr(row, name) for name in columns]


def test_a_bound_of_first_tokens_is_in_the_class_below_it(lite: Deployment) -> None:
    bounds = (50, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10_000)
    _summed(lite, *({"first_token_ms": each, "duration_ms": each} for each in bounds))
    _summed(lite, *({"first_token_ms": each + 1, "duration_ms": each + 1} for each in bounds))
    _summed(
        lite, {"first_token_ms": None, "duration_ms": 5}, {"first_token_ms": 0, "duration_ms": 0}
    )
    (row,) = _rows(lite)
    assert _classes(row, FIRST_COLUMNS) == [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]
    assert _classes(row, SPEED_COLUMNS) == [0] * 11, "no time passed after the first token"


def test_a_bound_of_speed_is_in_the_class_below_it(lite: Deployment) -> None:
    """The first token is not counted, as it came before the time that is measured."""
    bounds = (5, 10, 20, 30, 50, 75, 100, 150, 200, 400)
    timed = {"first_token_ms": 80, "duration_ms": 1080}
    _summed(lite, *({"output_tokens": each + 1, **timed} for each in bounds))
    _summed(lite, *({"output_tokens": each + 2, **timed} for each in bounds))
    slow = {"output_tokens": 3, "first_token_ms": 0, "duration_ms": 401}  # 2 in 0.401 s: 4.98
    _summed(lite, slow, slow | {"duration_ms": 400}, slow | {"duration_ms": 399})  # 5 and 5.01
    for none in (
        {"output_tokens": 1, **timed},
        {"output_tokens": 9, "first_token_ms": 80, "duration_ms": 80},
        {"output_tokens": 9, "first_token_ms": None, "duration_ms": 80},
    ):
        _summed(lite, none)
    (row,) = _rows(lite)
    assert _classes(row, SPEED_COLUMNS) == [3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 1]


def test_answers_are_told_apart_by_their_status(lite: Deployment) -> None:
    _summed(lite, *({"status": each} for each in (200, 399, 400, 404, 499, 500, 503, 599)))
    (row,) = _rows(lite)
    assert (row.answers, row.refused, row.failed) == (8, 3, 3)


def test_rows_are_by_member_adapter_key_and_hour(lite: Deployment) -> None:
    lite.clock.advance(days=1)
    at = datetime(2026, 1, 1, 5, 59, 59, 999_999, tzinfo=UTC)
    _summed(
        lite,
        {"occurred_at": at, "queue_ms": 7, "reordered_cached_tokens": 3},
        {"occurred_at": at + timedelta(microseconds=1), "queue_ms": 5},
        {"occurred_at": at, "member_id": "mem_a", "adapter": "pirate", "key_id": "other"},
    )
    named = (
        "at",
        "member_id",
        "adapter",
        "key_id",
        "answers",
        "queue_ms",
        "reordered_cached_tokens",
    )
    hourly = [tuple(getattr(row, name) for name in named) for row in _rows(lite, HourlyService)]
    hour = START + timedelta(hours=5)
    assert sorted(hourly) == [
        (hour, "", "", "key", 1, 7, 3),
        (hour, "mem_a", "pirate", "other", 1, 0, 0),
        (hour + timedelta(hours=1), "", "", "key", 1, 5, 0),
    ]
    daily = [tuple(getattr(row, name) for name in named) for row in _rows(lite)]
    assert sorted(daily) == [
        (START, "", "", "key", 2, 12, 3),
        (START, "mem_a", "pirate", "other", 1, 0, 0),
    ]
    first = _rows(lite)[0]
    assert (first.tenant_id, first.project_id, first.model) == ("acme", "proj", "demo")
    assert (first.kind, first.currency, first.price_version) == (
        "generation",
        "USD",
        lite.version.id,
    )


def test_busy_time_is_by_day_and_engine(lite: Deployment) -> None:
    _summed(
        lite,
        {"engine_id": "e1", "busy_us": 5},
        {"engine_id": "e1", "busy_us": 1},
        {"engine_id": "e1", "busy_us": 0},
        {"engine_id": "e2", "busy_us": 9, "adapter": "pirate"},
    )
    _summed(lite, {"engine_id": "e1", "busy_us": 10})
    named = ("at", "tenant_id", "model", "adapter", "engine_id", "currency", "answers", "busy_us")
    rows = _rows(lite, DailyEngineTime)
    found = [tuple(getattr(row, name) for name in named) for row in rows]
    assert found == [
        (START, "acme", "demo", "", "e1", "USD", 3, 16),
        (START, "acme", "demo", "pirate", "e2", "USD", 1, 9),
    ]


def _kept(lite: Deployment, *tables: Any) -> list[list[dict[str, Any]]]:
    with lite.database.read() as session:
        return [
            [dict(row) for row in session.execute(select(table.__table__)).mappings()]
            for table in tables
        ]


def test_a_rebuild_begins_on_the_second_day_that_is_kept(lite: Deployment) -> None:
    """Of January 2 events may be missing; of January 3 none is."""
    lite.clock.advance(days=5)
    days = [START + timedelta(days=number) for number in range(4)]
    _summed(lite, *({"occurred_at": day, "busy_us": 5, "engine_id": "e"} for day in days))
    tables = (HourlyService, DailyService, DailyEngineTime, HourlyUsage, DailyUsage)
    before = _kept(lite, *tables)
    assert [len(each) for each in before] == [4, 4, 4, 4, 4]
    with lite.database.transaction() as session:
        row = {"floor_id": "req_b", "events": 1, "dropped_at": days[3]}
        older = row | {"floor_id": "req_a"}
        session.add(UsageRetention(kept_from=days[1], **row))
        session.add(UsageRetention(kept_from=days[0], **older))
        session.execute(update(DailyService).values(queue_ms=99))
        session.execute(update(DailyUsage).values(requests=99))
        session.flush()
        service_rollups.rebuild(session, lite.clock)
        assert rollups.rebuild(session) == (2, 2)
    found = _kept(lite, *tables)
    assert sorted(row["at"] for row in found[1] if row["queue_ms"] == 99) == days[:2]
    assert sorted(row["at"] for row in found[4] if row["requests"] == 99) == days[:2]
    assert [len(each) for each in found] == [4, 4, 4, 4, 4]
    for old, new in ((before[0], found[0]), (before[3], found[3])):
        assert sorted(map(str, old)) == sorted(map(str, new))


def test_a_rebuild_sums_what_was_rated_and_no_more(lite: Deployment) -> None:
    lite.record(lite.event())
    lite.rate()
    lite.record(lite.event())  # not rated yet
    with lite.database.transaction() as session:
        service_rollups.rebuild(session, lite.clock)
    (row,) = _rows(lite)
    assert row.answers == 1
    with lite.database.read() as session:
        states = session.execute(select(UsageBatch.rated_at, UsageBatch.summed_at)).all()
    assert [(bool(rated), bool(summed)) for rated, summed in states] == [
        (True, True),
        (False, False),
    ]
    lite.rate()
    assert service_rollups.sum_all(lite.database, lite.clock) == 1
    assert [each.answers for each in _rows(lite)] == [2]


def test_what_is_charged_after_its_batch_was_summed_is_added_once(lite: Deployment) -> None:
    _summed(lite, {"request_id": "req_a"})
    lite.record(lite.event(request_id="req_b"))
    lite.rate()
    with lite.database.transaction() as session:
        session.execute(delete(HourlyService))
        session.execute(delete(DailyService))
        service_rollups.add_released(session, ["req_a", "req_b"])
    (row,) = _rows(lite)
    assert row.answers == 1, "the batch of the other is summed later"
    with lite.database.read() as session:
        assert len(session.scalars(select(Charge)).all()) == 2


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([10, 0, 0], 0.5, 25.0),  # in the middle of 0 to 50
        ([10, 0, 0], 1.0, 50.0),
        ([5, 5, 0], 0.5, 50.0),
        ([5, 5, 0], 0.75, 75.0),
        ([0, 4, 0], 0.25, 62.5),
        ([1, 0, 1], 0.5, 50.0),
        ([0, 0, 3], 0.1, 100.0),
        ([1, 1, 8], 0.9, 100.0),
        ([0, 0, 0], 0.5, None),
    ],
)
def test_a_percentile_is_interpolated(counts: list[int], share: float, expected: float) -> None:
    assert percentile(counts, (50, 100), share) == expected


def test_the_sums_of_a_charge_and_of_an_adjustment() -> None:
    hour = datetime(2026, 1, 1, 5, tzinfo=UTC)
    row = {
        "tenant_id": "acme",
        "created_at": hour + timedelta(minutes=59, seconds=59, microseconds=999_999),
        "project_id": "proj",
        "model": "demo",
        "usage_period_id": "u",
        "bill_period_id": "b",
        "currency": "USD",
        "component": "output",
        "amount": -7,
    }
    hours = rollups._hours_of([row, row | {"component": "input", "amount": 2}])
    key = ("acme", hour, "proj", "", "demo", "", "adjustment", "", "u", "b", "USD")
    sums = dict(zip(rollups.SUMS, hours.pop(key), strict=True))
    assert hours == {}
    assert {name: value for name, value in sums.items() if value} == {
        "input_amount": 2,
        "output_amount": -7,
        "amount": -5,
    }
    later = (key[0], hour + timedelta(hours=3), *key[2:])
    values = list(range(len(rollups.SUMS)))
    days = rollups.by_day({key: values, later: values})
    day = (key[0], hour.replace(hour=0), *key[2:])
    assert days == {day: [2 * each for each in values]}
    other = (*day[:6], "generation", *day[7:])
    assert rollups.by_tenant_day(days | {other: values}) == {
        (hour.replace(hour=0), "acme", "demo", "USD"): [
            3 * values[rollups.SUMS.index(name)]
            for name in ("requests", "input_tokens", "cached_tokens", "output_tokens", "amount")
        ]
    }
    assert rollups.hour_of(hour - timedelta(microseconds=1)) == hour - timedelta(hours=1)
