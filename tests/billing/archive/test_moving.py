"""Moving closed days to a store that keeps them in memory: which days, which batches, and what is
compared. On ClickHouse's own engine it is done in `tests/contracts`."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.archive import frozen_sums
from billing.archive.comparing import store_differences
from billing.closing import closing, moving
from billing.closing.moving import Unmoved
from billing.usage.tables import (
    Charge,
    ClosedDay,
    MovedDay,
    UsageBatch,
    UsageEventRow,
    UsageRetention,
)
from core.clock import FakeClock
from core.database import Database
from core.errors import Conflict
from core.ids import floor_id
from tests.billing.conftest import START, Deployment, deployment_of
from tests.billing.exports.kept_store import (
    DAY,
    HOUR,
    MOMENT,
    NOW,
    Kept,
    batch_row,
    close_day,
    moved_row,
    use_three,
)


@pytest.fixture
def store() -> Kept:
    return Kept()


def _next(session: Session, last: MovedDay | None, keep_from: datetime) -> tuple[Any, ...] | None:
    found = moving._next(session, last, keep_from)
    return found and (found.day, found.after, found.last)


def test_the_next_day_to_move(session: Session) -> None:
    assert _next(session, None, NOW) is None
    for day in range(3):
        close_day(session, day, 10 * (day + 1))
    assert _next(session, None, START + DAY) == (START, 0, 10)
    assert _next(session, None, START + DAY - MOMENT) is None
    moved_row(session, 0, 0, 10)
    last = session.get_one(MovedDay, START)
    assert _next(session, last, START + 2 * DAY) == (START + DAY, 10, 20)
    assert _next(session, last, START + 2 * DAY - MOMENT) is None
    moved_row(session, 1, 10, 20, moved_at=None)
    begun = session.get_one(MovedDay, START + DAY)
    assert _next(session, begun, START) == (START + DAY, 10, 20), "one that was begun is ended"
    moved_row(session, 2, 20, 30)
    assert _next(session, session.get_one(MovedDay, START + 2 * DAY), NOW) is None


def test_a_day_is_claimed_with_the_name_of_its_store(lite: Deployment, store: Kept) -> None:
    with lite.database.transaction() as session:
        close_day(session, 0, 10)
        batch_row(session, 10, summed_at=None)
        batch_row(session, 11, summed_at=None)

    def _claim() -> Any:
        return moving._claim(lite.database, store, NOW)  # type: ignore[arg-type]

    assert _claim() is None, "the roll-ups have to read it first"
    with lite.database.transaction() as session:
        session.get_one(UsageBatch, 10).summed_at = START
    store.stored[START] = []
    with pytest.raises(Conflict, match="holds usage of another deployment"):
        _claim()
    store.stored.clear()
    claimed = _claim()
    assert (claimed.day, claimed.after, claimed.last) == (START, 0, 10)
    with lite.database.read() as session:
        row = session.get_one(MovedDay, START)
        kept = (row.after_batch, row.last_batch, row.store, row.moved_at, row.dropped_at)
        assert kept == (0, 10, "store-1", None, None)
        assert row.floor_id == floor_id("req", START + DAY + HOUR)
    assert _claim() == claimed, "it is begun once"
    store.name = "store-2"
    with pytest.raises(Conflict, match="Earlier days were moved to another ClickHouse database"):
        _claim()


def test_batches_are_copied_in_parts_of_fifty_thousand_events(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        counts = (1, 30_000, 19_999, 1, 50_000, 49_999, 7)
        for number, events in enumerate(counts, 1):
            batch_row(session, number, events)

    def _parts(after: int, last: int) -> list[tuple[int, int]]:
        return moving._parts(lite.database, moving._Day(START, after, last))

    assert _parts(1, 7) == [(2, 4), (5, 5), (6, 7)]
    assert _parts(0, 3) == [(1, 3)] and _parts(0, 1) == [(1, 1)]
    assert _parts(5, 6) == [(6, 6)] and _parts(7, 9) == []


def test_a_day_is_copied_anew_with_its_charges(lite: Deployment, store: Kept) -> None:
    use_three(lite)
    store.stored[START] = [("left by a copy that was cut off",)]
    moving._copy(lite.database, store, moving._Day(START, 1, 3))  # type: ignore[arg-type]
    assert store.done == [("clear", START), ("store", START), ("sum", START)]
    rows = store.stored[START]
    assert sorted(row[0] for row in rows) == ["req_2", "req_3"]
    with lite.database.read() as session:
        charged = session.get_one(Charge, "req_2")
    width = len(UsageEventRow.__table__.columns) + len(Charge.__table__.columns) - 1
    assert {len(row) for row in rows} == {width}
    assert all(charged.amount in row for row in rows)


def test_what_differs_between_the_store_and_the_closed_day(session: Session, store: Kept) -> None:
    sums = {"events": 2, "units": 5}
    close_day(session, 0, 10, sums)
    closed = session.get_one(ClosedDay, START)
    store.said = {"sums": sums, "groups": [], "hours": []}
    assert store_differences(session, store, closed) == []  # type: ignore[arg-type]
    store.said = {"sums": {"events": 1}, "groups": [("x",)], "hours": [("y",)]}
    found = store_differences(session, store, closed)  # type: ignore[arg-type]
    assert found == [
        "the store's rows sum to {'events': 1}, the day was closed with {'events': 2, 'units': 5}",
        "the store's charges differ from the frozen groups",
        "the store's hourly sums differ from the frozen groups",
    ]
    assert frozen_sums.stored_groups(session, START).charges == []


def test_a_day_that_differs_is_not_passed(lite: Deployment, store: Kept) -> None:
    use_three(lite)
    day = moving._Day(START, 0, 3)
    with lite.database.transaction() as session:
        sums = closing.row_sums(session, 0, 3)
        close_day(session, 0, 3, sums)
        store.said = {"sums": sums, "groups": [], "hours": []}
        moving._compare(session, store, day, rows_too=True)  # type: ignore[arg-type]
        shorter = replace(day, last=2)
        moving._compare(session, store, shorter, rows_too=False)  # type: ignore[arg-type]
        with pytest.raises(Conflict) as told:
            moving._compare(session, store, shorter, rows_too=True)  # type: ignore[arg-type]
        ours = closing.row_sums(session, 0, 2)
        said = f"The store does not hold 2026-01-01 as it was closed: the database has {ours}."
        assert str(told.value).startswith(said)
        store.said["hours"] = [("x",)]
        with pytest.raises(Conflict, match="hourly sums differ from the frozen groups"):
            moving._compare(session, store, day, rows_too=False)  # type: ignore[arg-type]


def test_days_are_dropped_an_hour_after_they_were_moved(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        moved_row(session, 2, 20, 30, moved_at=NOW - HOUR)
        moved_row(session, 1, 10, 20, moved_at=NOW - HOUR)
        moved_row(session, 3, 30, 40, moved_at=NOW - HOUR + MOMENT)
        moved_row(session, 4, 40, 50, moved_at=None)
        moved_row(session, 0, 0, 10, moved_at=NOW - 2 * HOUR, dropped_at=NOW)
    found = moving._droppable(lite.database, NOW)
    assert [(each.day, each.after, each.last) for each in found] == [
        (START + DAY, 10, 20),
        (START + 2 * DAY, 20, 30),
    ]


def test_the_first_day_after_what_retention_dropped(lite: Deployment) -> None:
    use_three(lite)
    with lite.database.transaction() as session:
        sums = closing.row_sums(session, 2, 3)
        close_day(session, 0, 1, {"events": 9})
        close_day(session, 1, 2, closing.row_sums(session, 1, 2))
        close_day(session, 2, 3, sums)
        days = [session.get_one(ClosedDay, START + n * DAY) for n in range(3)]
        assert moving._first(session, days) == (days[0], 0), "nothing was dropped"
        row = {"floor_id": "req_0", "events": 1, "dropped_at": NOW}
        session.add(UsageRetention(kept_from=START + DAY, **row))
        session.flush()
        assert moving._first(session, days) == (days[2], 2), "the first kept day may lack events"
        assert moving._first(session, days[:2])[0] is None
        days[2].sums = sums | {"events": 2}
        with session.no_autoflush:
            assert moving._first(session, days)[0] is None
            session.expire(days[2])


def test_days_that_should_have_been_moved(session: Session) -> None:
    assert moving.unmoved(session, NOW, 2) == Unmoved(0, None, 0.0)
    for day in range(9):
        close_day(session, day, day)
    # Of ten whole days two stay, so those of January 1 to 8; the first could move on January 4.
    waits = (NOW - (START + 3 * DAY)).total_seconds()
    assert moving.unmoved(session, NOW, 2) == Unmoved(8, START, waits)
    row = {"floor_id": "req_0", "events": 1, "dropped_at": NOW}
    session.add(UsageRetention(kept_from=START + DAY, **row))
    session.flush()
    kept = moving.unmoved(session, NOW, 2)
    assert (kept.days, kept.oldest) == (6, START + 2 * DAY)
    moved_row(session, 0, 0, 0, moved_at=None)
    assert moving.unmoved(session, NOW, 2).days == 6
    session.get_one(MovedDay, START).moved_at = NOW
    session.flush()
    assert moving.unmoved(session, NOW, 2).days == 7
    moved_row(session, 6, 5, 6)
    last = moving.unmoved(session, START + 10 * DAY, 2)
    assert last == Unmoved(1, START + 7 * DAY, 0.0)
    # Closed an hour into the day after it, when with no day kept it could have moved.
    fresh = moving.unmoved(session, START + 8 * DAY + 3 * HOUR, 0)
    assert fresh == Unmoved(1, START + 7 * DAY, 7200.0)
    moved_row(session, 8, 6, 8)
    assert moving.unmoved(session, NOW, 2) == Unmoved()


def test_a_day_moves_and_leaves_the_database(postgres_database: Database, store: Kept) -> None:
    """The statements that drop it are PostgreSQL's."""
    made = deployment_of(postgres_database, FakeClock())
    use_three(made)
    archive: Any = store
    with made.database.transaction() as session:
        session.execute(update(UsageBatch).values(summed_at=START))
        sums = closing.row_sums(session, 0, 2)
        close_day(session, 0, 2, sums)
        store.said = {"sums": sums, "groups": [], "hours": []}
    assert moving.move_days(made.database, archive, START + 2 * DAY, 2) == []
    assert moving.move_days(made.database, archive, START + 3 * DAY, 2) == [START]
    assert moving.move_days(made.database, archive, START + 3 * DAY, 2) == []
    assert sorted(row[0] for row in store.stored[START]) == ["req_1", "req_2"]
    later = START + 3 * DAY + HOUR
    assert moving.drop_moved(made.database, archive, later - MOMENT) == 0
    with moving.alone(made.database) as first, moving.alone(made.database) as second:
        assert (first, second) == (True, False)
        assert moving.drop_moved(made.database, archive, later) == 0
        assert moving.move_days(made.database, archive, later, 0) == []
    assert moving.drop_moved(made.database, archive, later) == 2
    assert moving.drop_moved(made.database, archive, later) == 0
    with made.database.read() as session:
        assert list(session.scalars(select(UsageEventRow.request_id))) == ["req_3"]
        assert list(session.scalars(select(Charge.request_id))) == ["req_3"]
        row = session.get_one(MovedDay, START)
        assert (row.moved_at, row.dropped_at) == (START + 3 * DAY, later)
