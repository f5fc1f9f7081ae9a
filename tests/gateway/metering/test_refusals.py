"""Only what can never be stored is parked; outages are retried, and parked records come back."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from msgspec import msgpack
from msgspec.structs import replace
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from billing.pricing.prices import ensure_default_prices
from billing.usage import usage
from billing.usage.tables import ParkedEvent, UsageEventRow
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.events import UsageEvent
from gateway.metering.batch_shippers import InlineShipper
from gateway.metering.parked_records import is_permanent
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile
from gateway.metering.spool_statements import (
    Statement,
    insert_opened,
    move_to_outbox,
    return_to_outbox,
)
from gateway.metering.usage_sink import SqlUsageSink
from migrations.run import downgrade, upgrade
from tests.gateway.metering.spool_rows import NOW, closed, opened
from tests.gateway.metering.test_spool import Books, Receipts, receipt, recovery
from tests.migrated import migrated


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(SpoolFile(tmp_path / "spool" / "1.db"))
    yield made
    made.file.close()


def price_of(database: Database) -> str:
    with database.transaction() as session:
        return ensure_default_prices(session, SystemClock(), "m").id


def event(name: str, price: str, **changes: object) -> UsageEvent:
    return replace(closed(name), price_version=price, **changes)


def stored(database: Database) -> list[str]:
    with database.read() as session:
        return sorted(session.scalars(select(UsageEventRow.request_id)))


def parked(database: Database) -> list[ParkedEvent]:
    with database.read() as session:
        return usage.parked(session)


async def until_shipped(shipper: Shipper, attempts: int = 1500) -> None:
    for _ in range(attempts):
        if not shipper.backlog():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{shipper.backlog()} records were not shipped")


async def test_a_read_only_standby_parks_nothing(spool: Spool, postgres_database: Database) -> None:
    price = price_of(postgres_database)
    name = postgres_database.db_engine.url.database
    await ship_through_fault(
        spool,
        postgres_database,
        price,
        f"alter database {name} set default_transaction_read_only = on",
        f"alter database {name} set default_transaction_read_only = off",
    )


async def test_a_gateway_that_is_newer_than_the_schema_parks_nothing(
    spool: Spool, postgres_database: Database
) -> None:
    price = price_of(postgres_database)
    await ship_through_fault(
        spool,
        postgres_database,
        price,
        "alter table usage_events rename column paid_by to not_yet",
        "alter table usage_events rename column not_yet to paid_by",
    )


async def ship_through_fault(
    spool: Spool, database: Database, price: str, fault: str, mend: str
) -> None:
    def _run(statement: str) -> None:
        url = database.url.replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("set transaction_read_only = off")
            admin.execute("set default_transaction_read_only = off")
            admin.execute(statement)
        database.db_engine.dispose()  # new sessions see the setting

    spool.bind(asyncio.get_running_loop())
    _run(fault)
    for number in range(3):
        await spool.close(event(f"req_{number}", price))
    shipper = Shipper(spool, SqlUsageSink(database, SystemClock()), pause_s=0.01)
    shipper.start()
    await asyncio.sleep(1.0)
    assert spool.file.parked() == 0 and shipper.backlog() == 3
    _run(mend)
    await until_shipped(shipper)
    await asyncio.to_thread(shipper.stop)
    assert stored(database) == ["req_0", "req_1", "req_2"]
    assert spool.file.parked() == 0 and not parked(database)


class _Stub(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("sqlstate", "permanent"),
    [
        ("22001", True),  # string_data_right_truncation
        ("22P05", True),  # untranslatable_character
        ("23514", True),  # check_violation
        ("25006", False),  # read_only_sql_transaction
        ("26000", False),  # invalid_sql_statement_name: PgBouncer in transaction mode
        ("42P05", False),  # duplicate_prepared_statement: the same
        ("42703", False),  # undefined_column: not migrated yet
        ("42501", False),  # insufficient_privilege
        ("40001", False),
        ("53100", False),  # disk_full
        ("XX000", False),
    ],
)
def test_the_sqlstate_decides(sqlstate: str, permanent: bool) -> None:
    error = DBAPIError("insert", {}, _Stub(sqlstate))
    assert is_permanent(error) is permanent


async def test_what_the_database_refuses_is_parked_there_and_released_by_the_command(
    spool: Spool, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from gateway.cli.main import main

    price = price_of(database)
    spool.bind(asyncio.get_running_loop())
    with database.transaction() as session:  # any constraint that one record breaks
        if database.dialect == "sqlite":
            session.execute(
                text(
                    "create trigger refuse before insert on usage_events when new.request_id = 'req_1'"
                    " begin select raise(abort, 'refused'); end"
                )
            )
        else:
            session.execute(
                text("alter table usage_events add constraint refuse check (request_id <> 'req_1')")
            )
    for number in range(3):
        await spool.close(event(f"req_{number}", price))
    shipper = InlineShipper(spool.file.connection, SqlUsageSink(database, SystemClock()))
    assert shipper.ship(0, 100).refused
    assert [shipper.ship(seq, 1).refused for seq in range(3)] == ["", "", ""]
    assert stored(database) == ["req_0", "req_2"]
    [row] = parked(database)
    assert (row.request_id, row.code) == ("req_1", "refused")

    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert main(["usage", "parked", "release", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"released": 0, "parked": 1}
    with database.transaction() as session:
        session.execute(
            text(
                "drop trigger refuse"
                if database.dialect == "sqlite"
                else "alter table usage_events drop constraint refuse"
            )
        )
    assert main(["usage", "parked", "release", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"released": 1, "parked": 0}
    assert stored(database) == ["req_0", "req_1", "req_2"]


async def test_a_record_that_cannot_be_read_is_parked_listed_and_dropped(
    spool: Spool, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from gateway.cli.main import main

    price = price_of(database)
    spool.bind(asyncio.get_running_loop())
    await spool.close(event("req_0", price))
    spool.file.commit([return_to_outbox("usage", b"\xc1junk")])
    await spool.close(event("req_2", price))
    shipper = Shipper(spool, SqlUsageSink(database, SystemClock()), pause_s=0.01)
    shipper.start()
    await until_shipped(shipper)
    await asyncio.to_thread(shipper.stop)
    assert stored(database) == ["req_0", "req_2"] and spool.file.parked() == 1

    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert main(["audit", "--json"]) == 1, "a parked record is not clean"
    assert json.loads(capsys.readouterr().out)["clean"] is False
    assert main(["usage", "parked", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert listed["id"].startswith("1.db:") and listed["code"] == "spool usage"
    assert main(["usage", "parked", "drop", listed["id"], "--by", "ann"]) == 0
    assert spool.file.parked() == 0
    assert main(["usage", "parked", "drop", listed["id"], "--by", "ann"]) == 2


async def test_one_bad_record_ends_recovery_neither_for_its_file_nor_for_later_ones(
    tmp_path: Path,
) -> None:
    receipts = Receipts()
    for number in (1, 2):
        file = SpoolFile(tmp_path / f"dead{number}.db")
        names = [f"req_{number}{letter}" for letter in "abc"]
        file.commit([insert_opened(opened(name)) for name in names])
        for letter in "xyz":
            file.commit(move_to_outbox(closed(f"req_{number}{letter}")))
        if number == 1:
            file.commit([Statement("update outbox set body = ? where seq = 2", (b"\xc1",))])
            unreadable = "update opened set body = ? where request_id = 'req_1b'"
            file.commit([Statement(unreadable, (b"\xc1",))])
        for name in names:
            receipts.known[name] = receipt(name)
        file.close()
    # More cached than prompt tokens: no usage event can be made of it.
    receipts.known["req_1a"] = dataclasses.replace(receipt("req_1a"), cached=99)
    books = Books()
    books.refused = {"req_1z"}
    rescue = recovery(tmp_path, books, receipts, FakeClock(NOW))
    await rescue.round()
    assert sorted(books.got) == ["req_1c", "req_1x", *(f"req_2{x}" for x in "abcxyz")]
    assert rescue.parked() == 4, "1a cannot be settled, 1b and 1y not be read, 1z not be stored"
    rescue.close()
    # What was parked is tried again when the file is adopted again.
    books.refused.clear()
    receipts.known["req_1a"] = receipt("req_1a")
    rescue = recovery(tmp_path, books, receipts, FakeClock(NOW))
    await rescue.round()
    assert "req_1z" in books.got and "req_1a" in books.got and rescue.parked() == 2
    rescue.close()


def test_a_file_that_is_no_database_is_left_and_the_others_are_recovered(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"this is no database" * 100)
    file = SpoolFile(tmp_path / "b.db")
    file.commit(move_to_outbox(closed("req_1")))
    file.close()
    books = Books()
    rescue = recovery(tmp_path, books, Receipts(), FakeClock(NOW))
    asyncio.run(rescue.round())
    assert list(books.got) == ["req_1"]
    rescue.close()
    assert (tmp_path / "a.db").exists()


def test_a_body_of_another_shape_is_an_error_of_the_record() -> None:
    with pytest.raises(ValueError) as caught:
        msgpack.decode(b"\x01", type=tuple[UsageEvent, None])
    assert is_permanent(caught.value)


def test_migrations_keep_the_append_only_guard_on_sqlite(sqlite_url: str) -> None:
    made = migrated(sqlite_url)
    for again in (False, True):
        if again:  # the two revisions that make the table again
            downgrade(made, "0007_sealed_secrets")
            upgrade(made)
        with made.read() as session:
            names = set(
                session.scalars(text("select name from sqlite_master where type='trigger'"))
            )
        assert {"append_only_usage_events_update", "append_only_usage_events_delete"} <= names
    made.close()
