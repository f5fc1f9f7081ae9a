"""Closed days move from PostgreSQL to ClickHouse and stay right: after a crash at any point, with late
usage, with repeated usage, and when either side is changed behind the books' back."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from billing.archive import erasure
from billing.archive.clickhouse import ClickHouseArchive
from billing.audit import reconcile
from billing.closing import closing, moving
from billing.exports.encoding import export_of, rows_of
from billing.exports.subjects import Period
from billing.invoicing import invoice_run
from billing.rating import rerating
from billing.usage import partitions, rollups, service_rollups, usage
from billing.usage.raw_rows import RawArchive, Rows
from core.database import Database
from core.errors import Conflict, DependencyDown
from core.events import EngineCount, UsageEvent
from core.settings import Settings
from core.tenants.scope import scope_of_operator
from gateway.cli.doctor import storage
from gateway.cli.doctor.check import Health
from tests.billing.conftest import Deployment
from tests.contracts.conftest import START

WHOLE = Period(START - timedelta(days=5), START + timedelta(days=60))
LATER = moving.DROPPED_AFTER


def exported(made: Deployment, what: str = "usage") -> list[dict[str, Any]]:
    names = [column.name for column in export_of(what).columns]
    with made.database.read() as session:
        return [
            dict(zip(names, row, strict=True))
            for row in rows_of(session, export_of(what), None, WHOLE)
        ]


def ids(made: Deployment) -> list[str]:
    return [row["request_id"] for row in exported(made)]


def stored(made: Deployment, table: str = "usage_events") -> int:
    with made.database.read() as session:
        return int(session.execute(text(f"select count(*) from {table}")).scalar_one())


def receipt(event: UsageEvent) -> EngineCount:
    counts = (event.input_tokens, event.cached_tokens, event.output_tokens + event.waived_tokens)
    return EngineCount(event.request_id, "engine", *counts, event.finished_at)


def serve(made: Deployment, **changes: Any) -> UsageEvent:
    event = made.event(**changes)
    made.record(event)
    with made.database.transaction() as session:
        usage.store_receipts(session, [receipt(event)])
    made.rate()
    return event


def days_of_usage(made: Deployment, days: int = 3) -> list[UsageEvent]:
    """Two requests a day, the days closed, and one of today."""
    found = []
    for _ in range(days):
        found.append(serve(made, end_user="ada"))
        made.clock.advance(hours=1)
        found.append(serve(made, model="demo", adapter="style", output_tokens=70))
        made.clock.advance(hours=23)
    made.clock.advance(hours=2)
    assert len(reconcile.close_days(made.database, made.clock)) == days
    return [*found, serve(made)]


def move(made: Deployment, archive: RawArchive, keep_days: int = 1) -> int:
    service_rollups.sum_all(made.database, made.clock)
    return len(moving.move_days(made.database, archive, made.clock.now(), keep_days))


def drop(made: Deployment, archive: RawArchive) -> int:
    return moving.drop_moved(made.database, archive, made.clock.now() + LATER)


def audit(made: Deployment, **options: Any) -> reconcile.AuditReport:
    with made.database.snapshot() as session:
        return reconcile.audit(session, **options)


def test_closed_days_move_and_leave_the_database_after_an_hour(
    with_archive: Deployment, archive: ClickHouseArchive
) -> None:
    made = with_archive
    events = days_of_usage(made)
    assert moving.move_days(made.database, archive, made.clock.now(), 1) == [], "not yet summed"
    before, charged = exported(made), exported(made, "charges")
    assert move(made, archive) == 2, "it keeps today and one whole day"
    assert moving.drop_moved(made.database, archive, made.clock.now()) == 0
    assert stored(made) == stored(made, "charges") == 7
    assert (exported(made), exported(made, "charges")) == (before, charged)
    assert audit(made).clean
    assert drop(made, archive) == 4 and drop(made, archive) == 0
    for table in ("usage_events", "charges", "engine_receipts"):
        assert stored(made, table) == 3, table
    assert [row["request_id"] for row in before] == [event.request_id for event in events]
    assert (exported(made), exported(made, "charges")) == (before, charged)
    assert audit(made).clean and audit(made, open_only=True, closed_days=None).clean
    with made.database.transaction() as session:
        tables = (rollups.HOURLY, rollups.DAILY)
        sums = [rollups.stored(session, table) for table in tables]
        service = text("select sum(answers), sum(amount) from service_daily")
        served = session.execute(service).one()
        for table in ("usage_hourly", "usage_daily", "service_daily"):  # of the first whole day
            latest = f"update {table} set amount = amount + 1 where at >= :day"
            damaged = session.execute(text(latest), {"day": made.clock.now() - timedelta(hours=3)})
            assert damaged.rowcount == 1, table  # type: ignore[attr-defined]
        rollups.rebuild(session)
        service_rollups.rebuild(session, made.clock)
        assert session.execute(service).one() == served
        assert [rollups.stored(session, table) for table in tables] == sums
    made.clock.advance(days=15)
    invoice_run.run(made.database, made.clock)
    assert reconcile.close_days(made.database, made.clock)
    assert move(made, archive) > 10 and drop(made, archive) == 3
    assert exported(made) == before and audit(made).clean


def change(archive: ClickHouseArchive, statement: str) -> None:
    """Behind the books' back."""
    archive._client.command(f"{statement} settings mutations_sync = 2")


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", ["store", "sum_hours", "compare", "_delete"])
def test_a_crash_at_any_point_loses_and_doubles_nothing(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    made = with_archive
    days_of_usage(made)
    before = exported(made)
    monkeypatch.setattr(moving, "_ROWS", 1)  # a part for each batch
    target: Any = archive if at in ("store", "sum_hours") else moving
    name = "store_differences" if at == "compare" else at
    plain, calls = getattr(target, name), []

    def _killed(*given: Any) -> Any:
        calls.append(given)
        found = plain(*given)
        if len(calls) == 2:
            raise Killed
        return found

    with monkeypatch.context() as patch:
        patch.setattr(target, name, _killed)
        with pytest.raises(Killed):
            move(made, archive)
            drop(made, archive)
    assert exported(made) == before
    assert audit(made).clean
    move(made, archive)
    drop(made, archive)
    assert stored(made) == 3
    assert exported(made) == before
    assert audit(made).clean


def test_nothing_is_dropped_when_the_store_holds_something_else(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_archive
    days_of_usage(made)
    before = exported(made)
    plain = archive._client.insert

    def _lossy(table: str, columns: Any, rows: Rows) -> None:
        if table == "tollhouse_usage":
            plain(table, columns, rows[:-1])

    def _away(table: str, columns: Any, rows: Rows) -> None:
        raise DependencyDown("ClickHouse does not answer.")

    archive.identity()
    for broken, error in ((_lossy, Conflict), (_away, DependencyDown)):
        with monkeypatch.context() as patch:
            patch.setattr(archive._client, "insert", broken)
            with pytest.raises(error):
                move(made, archive)
        assert drop(made, archive) == 0
        assert exported(made) == before
    assert move(made, archive) == 2
    change(archive, "alter table tollhouse_usage delete where model = 'demo'")
    with pytest.raises(Conflict, match="Nothing was dropped"):
        drop(made, archive)
    assert stored(made) == 7


FAULTS = {
    "a row is lost": "alter table tollhouse_usage delete where output_tokens = 70",
    "a count": "alter table tollhouse_usage update waived_tokens = 4 where output_tokens = 70",
    "an amount": "alter table tollhouse_usage update charge_amount = charge_amount + 1"
    " where output_tokens = 70",
    "a period": "alter table tollhouse_usage update charge_bill_period_id = 'x' where true",
    "an hour": "alter table tollhouse_hours update amount = amount + 1 where true",
    "hours": "alter table tollhouse_hours delete where true",
    "a row too many": "insert into tollhouse_usage select * replace('req_x' as request_id)"
    " from tollhouse_usage limit 1",
}


def test_the_audit_finds_every_change_of_a_moved_day(
    with_archive: Deployment, archive: ClickHouseArchive
) -> None:
    made = with_archive
    days_of_usage(made)
    move(made, archive)
    drop(made, archive)
    assert audit(made).clean
    client = archive._client
    for name, statement in FAULTS.items():
        for table in ("tollhouse_usage", "tollhouse_hours"):
            client.command(f"create table kept_{table} as {table}")
            client.command(f"insert into kept_{table} select * from {table}")
        ending = "" if statement.startswith("insert") else " settings mutations_sync = 2"
        client.command(statement + ending)
        found = [each.message for each in audit(made).differences]
        assert any("the store" in each for each in found), name
        for table in ("tollhouse_usage", "tollhouse_hours"):
            client.command(f"truncate table {table}")
            client.command(f"insert into {table} select * from kept_{table}")
            client.command(f"drop table kept_{table}")
    assert audit(made).clean
    # A batch that is inserted twice is no fault: it counts once.
    client.command("insert into tollhouse_usage select * from tollhouse_usage")
    assert audit(made).clean


def test_late_and_repeated_usage_of_a_moved_day_counts_once(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_archive
    late = made.event(output_tokens=11)  # it waits in a spool
    events = days_of_usage(made)
    move(made, archive)
    drop(made, archive)
    assert made.record(events[0], events[1], late) == 1, "two are known to the store"
    made.rate()
    assert made.record(late) == 0
    assert sorted(ids(made)) == sorted([late.request_id, *(e.request_id for e in events)])
    with made.database.transaction() as session:  # receipts may come late, too
        usage.store_receipts(session, [receipt(events[0]), receipt(late)])
    assert audit(made).clean
    made.clock.advance(days=3)
    assert reconcile.close_days(made.database, made.clock)
    move(made, archive)
    drop(made, archive)
    assert sorted(ids(made)) == sorted([late.request_id, *(e.request_id for e in events)])
    assert audit(made).clean

    # Without an answer it is not known whether old usage is there: it waits, and current usage does not.
    another = made.event(request_id=late.request_id[:-4] + "zzzz", occurred_at=START)
    with monkeypatch.context() as patch:
        patch.setattr(archive, "known", _down)
        assert made.record(late, another, made.event()) == 3
        with made.database.read() as session:
            assert {row.code for row in usage.parked(session)} == {"unchecked"}
    with made.database.transaction() as session:
        assert usage.release(session, made.clock) == 1, "one is new"
        session.flush()
        assert usage.parked(session) == []
    made.rate()
    assert audit(made).clean
    assert len(ids(made)) == len(set(ids(made))) == len(events) + 3


def _down(*_given: Any) -> Any:
    raise DependencyDown("ClickHouse does not answer.")


def test_a_rating_that_crosses_the_border_agrees_with_the_ledger(
    with_archive: Deployment, archive: ClickHouseArchive
) -> None:
    made = with_archive
    first = made.event()
    made.record(first)
    made.clock.advance(days=1)
    second = made.event()
    made.record(second)
    with made.database.transaction() as session:
        usage.store_receipts(session, [receipt(first), receipt(second)])
    made.rate()  # both days in one transaction
    made.clock.advance(days=1, hours=2)
    assert len(reconcile.close_days(made.database, made.clock)) == 2
    assert move(made, archive) == 1 and drop(made, archive) == 1
    assert audit(made).clean
    change(archive, "alter table tollhouse_usage update charge_amount = 1 where true")
    assert "charges/ledger" in {each.check for each in audit(made).differences}


def test_an_end_user_is_erased_from_moved_days(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_archive
    days_of_usage(made)
    move(made, archive)
    drop(made, archive)
    assert sum(row["end_user"] == "ada" for row in exported(made)) == 3
    scope = scope_of_operator("acme", "test")

    def _erase(name: str) -> int:
        with made.database.transaction() as session:
            return erasure.erase_end_user(session, scope, made.clock, name).events

    with monkeypatch.context() as patch:
        patch.setattr(archive, "erase", _down)
        with pytest.raises(DependencyDown):
            _erase("ada")
    assert sum(row["end_user"] == "ada" for row in exported(made)) == 3, "nowhere"
    with moving.alone(made.database), pytest.raises(Conflict, match="being moved"):
        _erase("ada")
    assert _erase("a\\' or 1=1 --") == 0
    assert _erase("ada") == 3
    assert {row["end_user"] for row in exported(made)} == {None}
    assert audit(made).clean


def test_another_database_and_an_older_layout_are_named(
    with_archive: Deployment, archive: ClickHouseArchive
) -> None:
    made = with_archive
    days_of_usage(made)
    client = archive._client
    client.command("create table tollhouse_usage (a Int64) engine = MergeTree order by a")
    with pytest.raises(DependencyDown, match="tollhouse_usage on ClickHouse is another one"):
        move(made, archive)
    client.command("drop table tollhouse_usage")
    ClickHouseArchive(client).identity()
    client.command("alter table tollhouse_hours modify column requests Int8")
    with pytest.raises(DependencyDown, match=r"column requests of tollhouse_hours .* is Int8,"):
        move(made, ClickHouseArchive(client))
    client.command("drop table tollhouse_hours")
    day = made.clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
    ClickHouseArchive(client).identity()
    client.command(
        "insert into tollhouse_usage (day, request_id) values"
        f" ('{day - timedelta(days=90):%Y-%m-%d}', 'req_x')"
    )
    with pytest.raises(Conflict, match="usage of another deployment"):
        move(made, ClickHouseArchive(client))
    client.command("truncate table tollhouse_usage")
    assert move(made, archive) == 2
    client.command("alter table tollhouse_usage drop column busy_us")
    assert len(list(ClickHouseArchive(client).days())) == 2  # an added column is made
    client.command("truncate table tollhouse_store")
    other = ClickHouseArchive(client)
    with pytest.raises(Conflict, match="another ClickHouse database"):
        move(made, other)
    made.database._sessions.kw["info"] = {RawArchive: other}
    with pytest.raises(DependencyDown, match="names another ClickHouse database"):
        exported(made)
    elsewhere = Database(made.database.url, session_info={RawArchive: other})
    with (
        pytest.raises(DependencyDown, match="does not name") as told,
        elsewhere.transaction() as session,
    ):
        erasure.erase_end_user(session, scope_of_operator("acme", "test"), made.clock, "ada")
    elsewhere.close()
    assert str(told.value.next_step).startswith("Nothing was erased")
    assert any("another ClickHouse" in each.message for each in audit(made).differences)


def test_doctor_and_the_audit_miss_a_store_that_is_not_set(
    with_archive: Deployment, archive: ClickHouseArchive
) -> None:
    made = with_archive
    days_of_usage(made)
    settings = Settings(database_url=made.database.url)
    assert storage.archive(settings, made.clock).health is not Health.BAD
    move(made, archive)
    finding = storage.archive(settings, made.clock)
    assert finding.health is Health.BAD and "2026-01-21" in finding.says
    plain = Deployment(Database(made.database.url), made.clock, made.version)
    with pytest.raises(DependencyDown, match="TOLLHOUSE_EVENTS_URL is not set"):
        exported(plain)  # not a part of the rows as if it were all
    with (
        pytest.raises(DependencyDown, match="does not name"),
        plain.database.transaction() as session,
    ):
        erasure.erase_end_user(session, scope_of_operator("acme", "test"), plain.clock, "ada")
    found = [each.message for each in audit(plain).differences]
    assert any("TOLLHOUSE_EVENTS_URL is not set" in each for each in found)
    old = made.event(request_id="req_01hxxxxxxxxxxxxxxxxxxxxxxx"[:30], occurred_at=START)
    assert plain.record(old) == 1
    with plain.database.read() as session:
        assert [row.code for row in usage.parked(session)] == ["unchecked"]
    plain.database.close()


def test_retention_deletes_nothing_where_days_are_moved(
    with_archive: Deployment, archive: ClickHouseArchive
) -> None:
    made = with_archive
    with made.database.transaction() as session:
        partitions.ensure_ahead(session, made.clock.now())
    days_of_usage(made)
    made.clock.advance(days=60)
    assert reconcile.close_days(made.database, made.clock)
    with made.database.transaction() as session:
        assert closing.drop_old_usage(session, 1, made.clock.now()) == 0
    assert stored(made) == 7


def test_re_rating_reads_moved_charges(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_archive
    days_of_usage(made)
    right = made.price({"input": "7", "output": "9"}, model="demo")
    wanted = rerating.Request(made.version.id, right.id, START, made.clock.now())

    def _plan() -> list[rerating.Change]:
        with made.database.read() as session:
            return rerating.plan(session, wanted)

    before = _plan()
    assert sum(each.quantity for each in before) > 0
    move(made, archive)
    assert _plan() == before
    drop(made, archive)
    assert _plan() == before
    with monkeypatch.context() as patch:
        patch.setattr(archive, "charged", _down)
        with pytest.raises(DependencyDown):
            _plan()
    with made.database.transaction() as session:
        assert rerating.post_all(session, made.clock, wanted)
        session.flush()
        assert rerating.post_all(session, made.clock, wanted) == []
    assert audit(made).clean
