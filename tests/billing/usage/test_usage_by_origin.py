"""Days by end user and by engine: the events' sums, also after an erasure and a rebuild."""

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import select, true

from billing.archive.erasure import erase_end_user
from billing.usage import origin_rollups, rollup_writes, service_rollups
from billing.usage.batch_claims import claim_batches
from billing.usage.origin_rollups import OTHERS
from billing.usage.tables import (
    Charge,
    DailyEndUserUsage,
    UsageBatch,
    UsageEventRow,
    UsageRetention,
)
from billing.usage.usage_buckets import BucketPage, BucketQuery, Width, usage_buckets
from core.database import Database
from core.events import UsageEvent
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment

DAYS = 5
ACME = scope_of_operator("acme")
USERS = (None, "ann", "bob", "Zoë O'Brien")
ENGINES = ("gpu-1", "gpu-2", "")


def events_of(deployment: Deployment, count: int = 120) -> list[UsageEvent]:
    draw = random.Random(7)
    made = []
    for number in range(count):
        at = START + timedelta(minutes=draw.randrange(DAYS * 1440))
        made.append(
            deployment.event(
                tenant_id="acme" if number % 10 else "other",
                project_id=draw.choice(("proj", "second")),
                end_user=draw.choice(USERS),
                engine_id=draw.choice(ENGINES),
                status=draw.choice((200, 200, 200, 400, 503)),
                occurred_at=at,
                finished_at=at,
                input_tokens=draw.randrange(20, 5000),
                output_tokens=draw.randrange(0, 300),
                key_id=draw.choice(("key", "key2")),
            )
        )
    return made


def fill(deployment: Deployment) -> list[UsageEvent]:
    deployment.tenant("other")
    deployment.clock.advance(days=DAYS)
    made = events_of(deployment)
    for start in range(0, len(made), 50):
        deployment.record(*made[start : start + 50])
        deployment.rate()
        service_rollups.sum_all(deployment.database, deployment.clock)
    return made


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    heard: list[str] = []

    def _hear(_c: object, _cursor: object, statement: str, *_rest: object) -> None:
        heard.append(statement)

    sqlalchemy_event.listen(database.db_engine, "before_cursor_execute", _hear)
    yield heard
    sqlalchemy_event.remove(database.db_engine, "before_cursor_execute", _hear)


def days(name: str, **more: object) -> BucketQuery:
    end = START + timedelta(days=DAYS)
    return BucketQuery(START, end, Width.DAY, (name,), DAYS, **more)  # type: ignore[arg-type]


def read(deployment: Deployment, query: BucketQuery) -> BucketPage:
    with deployment.database.read() as session:
        return usage_buckets(session, ACME, query)


def rows_of(page: BucketPage, name: str) -> dict[tuple[datetime, str | None], dict[str, int]]:
    return {
        (bucket.start, row.group[name]): {**row.counts, **row.amounts}
        for bucket in page.buckets
        for row in bucket.rows
    }


@pytest.mark.parametrize("name", ["end_user", "engine_id"])
def test_days_by_origin_are_the_sums_of_the_events(deployment: Deployment, name: str) -> None:
    made = fill(deployment)
    with statements(deployment.database) as heard:
        found = rows_of(read(deployment, days(name)), name)
    assert not any("usage_events" in each for each in heard), "only the roll-ups are read"
    with deployment.database.read() as session:
        charged = session.execute(select(Charge.request_id, Charge.amount)).all()
    amounts = {row.request_id: row.amount for row in charged}
    tokens: Counter[tuple[datetime, str | None]] = Counter()
    money: Counter[tuple[datetime, str | None]] = Counter()
    requests: Counter[tuple[datetime, str | None]] = Counter()
    for each in made:
        if each.tenant_id == "acme":
            day = each.occurred_at.replace(hour=0, minute=0, second=0, microsecond=0)
            key = (day, getattr(each, name))
            tokens[key] += each.input_tokens
            money[key] += amounts[each.request_id]
            requests[key] += each.status < 500
    assert {key: sums["input_tokens"] for key, sums in found.items()} == dict(tokens)
    assert {key: sums["amount"] for key, sums in found.items()} == dict(money)
    assert {key: sums["requests"] for key, sums in found.items()} == dict(requests)
    from_events = rows_of(read(deployment, days(name, conditions=(true(),))), name)
    assert found == from_events


def test_a_project_sees_its_own_days(deployment: Deployment) -> None:
    fill(deployment)
    query = days("end_user", project_ids=("second",))
    found = rows_of(read(deployment, query), "end_user")
    exact = days("end_user", project_ids=("second",), conditions=(true(),))
    assert found == rows_of(read(deployment, exact), "end_user") and found


@pytest.mark.parametrize(
    "narrow", [{"models": ("demo",)}, {"key_ids": ("key2",)}, {"batch": False}, {"kinds": ("x",)}]
)
def test_what_the_roll_ups_lack_is_read_from_events(
    lite: Deployment, narrow: dict[str, object]
) -> None:
    fill(lite)
    with statements(lite.database) as heard:
        found = rows_of(read(lite, days("end_user", **narrow)), "end_user")
    assert any("usage_events" in each for each in heard)
    exact = days("end_user", **narrow, conditions=(true(),))
    assert found == rows_of(read(lite, exact), "end_user")


@pytest.mark.parametrize("projects", [(), ("second",)])
def test_the_largest_are_told_apart_and_the_rest_are_one_row(
    deployment: Deployment, projects: tuple[str, ...]
) -> None:
    made = [
        each
        for each in fill(deployment)
        if each.tenant_id == "acme" and each.project_id in (projects or ("proj", "second"))
    ]
    by_name: dict[str, Counter[str]] = defaultdict(Counter)
    by_day: dict[datetime, Counter[str]] = defaultdict(Counter)
    own: dict[tuple[str, datetime], Counter[str]] = defaultdict(Counter)
    for each in made:
        name = each.end_user or ""
        day = each.occurred_at.replace(hour=0, minute=0, second=0, microsecond=0)
        sums = {
            "requests": int(each.status < 500),
            "input_tokens": each.input_tokens,
            "output_tokens": each.output_tokens,
        }
        for target in (by_name[name], by_day[day], own[name, day]):
            target.update(sums)
    ranked = sorted(by_name, key=lambda name: (-by_name[name]["input_tokens"], name))
    columns = ("requests", "input_tokens", "output_tokens")
    for most in (1, 2, 3, len(ranked), 50):
        with deployment.database.read() as session:
            found = origin_rollups.largest_end_users(
                *(session, ACME, (START, START + timedelta(days=DAYS)), columns),
                most=most,
                drawn=2,
                projects=projects,
            )
        told = ranked[:most]
        assert [name for name in found.by_name if name != OTHERS] == told
        for name in told:
            assert found.by_name[name] == by_name[name], name
        rest = {each: sum(by_name[name][each] for name in ranked[most:]) for each in columns}
        assert found.by_name.get(OTHERS, dict.fromkeys(columns, 0)) == rest
        assert found.by_day == by_day
        drawn = sorted(told, key=lambda name: -by_name[name]["requests"])[:2]
        assert {name: set(days) for name, days in found.drawn.items()} == {
            name: {day for named, day in own if named == name} for name in drawn
        }
        for name, days_of in found.drawn.items():
            assert days_of == {day: own[name, day] for day in days_of}


def test_an_erased_name_leaves_its_sums_to_no_name(deployment: Deployment) -> None:
    fill(deployment)
    before = rows_of(read(deployment, days("end_user")), "end_user")
    with deployment.database.transaction() as session:
        erase_end_user(session, ACME, deployment.clock, "ann")
    after = rows_of(read(deployment, days("end_user")), "end_user")
    assert after == rows_of(read(deployment, days("end_user", conditions=(true(),))), "end_user")
    assert {name for _, name in after} == {None, "bob", "Zoë O'Brien"}
    for column in ("input_tokens", "requests", "amount"):
        assert sum(sums[column] for sums in after.values()) == sum(
            sums[column] for sums in before.values()
        )
    with deployment.database.read() as session:
        left = session.execute(
            select(DailyEndUserUsage.tenant_id, DailyEndUserUsage.end_user)
        ).all()
        assert ("acme", "ann") not in left and ("other", "ann") in left


def test_an_erasure_waits_for_batches_that_are_being_summed(deployment: Deployment) -> None:
    deployment.record(deployment.event(end_user="ann"))
    deployment.rate()

    def _erase() -> None:
        with deployment.database.transaction() as session:
            erase_end_user(session, ACME, deployment.clock, "ann")

    erasing = threading.Thread(target=_erase)
    with deployment.database.transaction() as session:
        taken = claim_batches(session, UsageBatch.summed_at.is_(None), most_events=10)
        chosen = UsageEventRow.batch_id.in_(taken)
        origin_rollups.add(session, chosen, rollup_writes.contents_of(session, chosen).columns)
        session.flush()
        erasing.start()
        erasing.join(0.5)
        assert erasing.is_alive(), "it waits"
    erasing.join(30)
    with deployment.database.read() as session:
        assert list(session.scalars(select(DailyEndUserUsage.end_user))) == [""]


def test_a_rebuild_of_days_by_origin_changes_nothing(deployment: Deployment) -> None:
    fill(deployment)  # the first event is hours after its day began
    queries = [days("end_user"), days("engine_id")]
    before = [read(deployment, query) for query in queries]
    with deployment.database.transaction() as session:
        service_rollups.rebuild(session, deployment.clock)
    assert [read(deployment, query) for query in queries] == before


def test_usage_that_is_released_later_is_added(deployment: Deployment) -> None:
    fill(deployment)
    with deployment.database.transaction() as session:
        service_rollups.rebuild(session, deployment.clock)
        late = deployment.event(end_user="late", occurred_at=START, finished_at=START)
    deployment.record(late)
    deployment.rate()
    service_rollups.sum_all(deployment.database, deployment.clock)
    found = rows_of(read(deployment, days("end_user")), "end_user")
    assert found[START, "late"]["requests"] == 1


@pytest.mark.parametrize(("day", "from_events"), [(0, True), (1, True), (2, False), (3, False)])
def test_days_before_the_last_dropped_month_are_read_from_the_events_that_are_left(
    lite: Deployment, day: int, from_events: bool
) -> None:
    fill(lite)
    kept_from = START + timedelta(days=2)
    with lite.database.transaction() as session:
        dropped = UsageRetention(
            floor_id="req_", kept_from=kept_from, events=0, dropped_at=kept_from
        )
        session.add(dropped)
    start = START + timedelta(days=day)
    query = BucketQuery(start, START + timedelta(days=DAYS), Width.DAY, ("end_user",), DAYS)
    with statements(lite.database) as heard:
        found = read(lite, query)
    assert any("usage_events" in each for each in heard) is from_events
    assert [each.start for each in found.buckets] == [
        START + timedelta(days=n) for n in range(day, DAYS)
    ]
    assert all(bucket.rows for bucket in found.buckets)
