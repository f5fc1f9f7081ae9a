"""What is read of moved days, and from where: of a store that keeps them in memory, and the database."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session

from billing.archive import erasing
from billing.archive.comparing import moved_differences
from billing.usage import late
from billing.usage.border import Border, border_of, readable
from billing.usage.raw_rows import Grouping, RawArchive, Reading, Wanted
from billing.usage.reading import charged_sums, known_elsewhere, read_buckets, read_rows
from billing.usage.tables import Charge, ClosedDay, UsageEventRow
from core.database import Database
from core.errors import Conflict, DependencyDown
from tests.billing.conftest import START, Deployment
from tests.billing.exports.kept_store import (
    DAY,
    HOUR,
    MOMENT,
    NOW,
    Kept,
    close_day,
    moved_row,
    use_three,
)


@pytest.fixture
def store() -> Kept:
    return Kept()


@pytest.fixture
def moved(lite: Deployment, store: Kept) -> Iterator[Deployment]:
    """Whose sessions know the store."""
    database = Database(lite.database.url, session_info={RawArchive: store})
    yield replace(lite, database=database)
    database.close()


def test_the_border_is_that_of_all_moved_days(session: Session) -> None:
    assert border_of(session) is None
    moved_row(session, 3, 30, 40, moved_at=None)
    assert border_of(session) is None
    moved_row(session, 1, 10, 20)
    moved_row(session, 2, 20, 30)
    border = border_of(session)
    assert border == Border(START + DAY, START + 2 * DAY, 10, 30, "store-1", "req_2")
    assert border.until == START + 3 * DAY + HOUR
    assert border.whole_from == START + 4 * DAY


def test_a_store_of_another_name_is_not_read(store: Kept) -> None:
    border = Border(START, START + DAY, 0, 2, "store-2", "req_2")
    archive: Any = store
    said = "names another ClickHouse database than the one to which 2026-01-01 to 2026-01-02"
    with pytest.raises(DependencyDown, match=said):
        readable(archive, border)
    assert readable(archive, replace(border, store="store-1")) is archive


READING = Reading((UsageEventRow.request_id,), (UsageEventRow.request_id,))


def _ids(session: Session, wanted: Wanted, reading: Reading = READING, **more: Any) -> list[str]:
    return [row[0] for row in read_rows(session, wanted, reading, **more)]


def test_rows_of_the_store_and_of_the_database_are_one_list(moved: Deployment, store: Kept) -> None:
    use_three(moved)
    wanted = Wanted(START - DAY, START + DAY, "acme")
    with moved.database.transaction() as session:
        assert _ids(session, wanted) == ["req_1", "req_2", "req_3"] and store.asked == []
        moved_row(session, 0, 0, 2)
        store.answers = [("req_1", "req_1"), ("req_2", "req_2"), ("req_4", "req_4")]
        assert _ids(session, wanted) == ["req_1", "req_2", "req_3", "req_4"]
        assert store.asked == [replace(wanted, last_day=START)]
        falling = replace(READING, falling=True, limit=2)
        store.answers.reverse()
        assert _ids(session, wanted, falling) == ["req_4", "req_3"]
        later = replace(wanted, start=START + DAY + HOUR - MOMENT, end=START + 9 * DAY)
        assert len(_ids(session, later)) == 3
        asked = len(store.asked)
        assert _ids(session, replace(later, start=START + DAY + HOUR)) == []
        assert len(store.asked) == asked, "nothing of it is moved"


def test_a_store_that_is_away_is_told_or_left_out(moved: Deployment, store: Kept) -> None:
    use_three(moved)
    wanted = Wanted(START - DAY, START + DAY)
    with moved.database.transaction() as session:
        moved_row(session, 0, 0, 2)
        store.down = True
        with pytest.raises(DependencyDown):
            _ids(session, wanted)
        lacks: list[str] = []
        assert _ids(session, wanted, lacks=lacks) == ["req_3"]
        assert lacks == ["ClickHouse is away."]
        border, rows = read_buckets(session, wanted, Grouping(3600), lacks)
        assert (border and border.last_day, rows, len(lacks)) == (START, [], 2)
        store.down, store.answers = False, [{"bucket": 5}]
        assert read_buckets(session, wanted, Grouping(3600))[1] == [{"bucket": 5}]
        later = Wanted(START + DAY + HOUR, START + 2 * DAY)
        assert read_buckets(session, later, Grouping(3600))[1] == []
        session.info.clear()
        with pytest.raises(DependencyDown, match="and TOLLHOUSE_EVENTS_URL is not set"):
            known_elsewhere(session, ["req_9"])


def test_charges_of_both_are_summed_by_key(moved: Deployment, store: Kept) -> None:
    use_three(moved)
    key, sums = (UsageEventRow.model,), (Charge.output_tokens, Charge.input_tokens)
    none: tuple[ColumnElement[bool], ...] = ()
    with moved.database.transaction() as session:
        assert charged_sums(session, key, sums, none) == [("demo", 150, 300)]
        moved_row(session, 0, 0, 2)
        store.answers = [("demo", 7, None), ("alpha", 1, 2)]
        assert charged_sums(session, key, sums, none) == [("alpha", 1, 2), ("demo", 57, 100)]
        assert store.asked == [START]


def test_late_usage_asks_the_store_only_for_what_may_be_there(
    moved: Deployment, store: Kept
) -> None:
    with moved.database.transaction() as session:
        assert known_elsewhere(session, ["req_there"]) == set()
        moved_row(session, 0, 0, 2)
        assert known_elsewhere(session, []) == set() and store.asked == []
        assert late.moved_requests(session, "", ["req_a"]) == late.MovedRequests()
        current = late.moved_requests(session, "req_b", ["req_b", "req_c"])
        assert current == late.MovedRequests() and store.asked == []
        found = late.moved_requests(session, "req_b", ["req_a there", "req_b", "other", "req_a"])
        assert found == late.MovedRequests(known={"req_a there"})
        assert store.asked == [(("req_a there", "other", "req_a"), START)]
        store.down = True
        away = late.moved_requests(session, "req_b", ["req_a", "req_c"])
        assert (away.known, away.unchecked) == (set(), {"req_a"})
        assert away.reason == "its day was moved, so it may be a duplicate. ClickHouse is away."


def test_the_audit_names_what_it_cannot_compare(moved: Deployment, store: Kept) -> None:
    with moved.database.transaction() as session:
        close_day(session, 0, 2, {"events": 1})
        moved_row(session, 0, 0, 2)
        border, closed = border_of(session), session.get_one(ClosedDay, START)
        assert border is not None
        store.said = {"sums": {"events": 1}, "groups": [], "hours": []}
        assert moved_differences(session, border, closed) == []
        store.down = True
        away = ["its rows cannot be compared: ClickHouse is away."]
        assert moved_differences(session, border, closed) == away
        session.info.clear()
        unset = ["its rows are on ClickHouse, but TOLLHOUSE_EVENTS_URL is not set"]
        assert moved_differences(session, border, closed) == unset


def test_a_name_is_erased_in_the_store_that_has_it(moved: Deployment, store: Kept) -> None:
    free = [True]
    with moved.database.transaction() as session:
        connection: Any = session.connection().connection.driver_connection
        # PostgreSQL's function; whether another process moves a day is what the test says.
        connection.create_function("pg_try_advisory_xact_lock", 1, lambda _key: free[0])
        assert erasing.erase_moved(session, "acme", "ada") == 0 and store.asked == []
        moved_row(session, 0, 0, 2)
        assert erasing.erase_moved(session, "acme", "ada") == 7
        assert store.asked == [("acme", "ada")]
        free[0] = False
        with pytest.raises(Conflict, match="A day of usage is being moved"):
            erasing.erase_moved(session, "acme", "ada")
        free[0], store.name = True, "store-2"
        with pytest.raises(DependencyDown, match="does not name"):
            erasing.erase_moved(session, "acme", "ada")
        session.info.clear()
        free[0] = False
        with pytest.raises(DependencyDown, match="does not name"):
            erasing.erase_moved(session, "acme", "ada")
    assert datetime(2026, 1, 11, 5, tzinfo=UTC) == NOW
