"""Closed days: frozen, signed, and enough for an audit that reads only what came since."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from billing.archive import frozen_sums
from billing.audit import reconcile
from billing.closing import closing, moving
from billing.closing.closing import DAY, signed_days_are_unchanged
from billing.guards import allow_maintenance
from billing.invoicing import invoice_run
from billing.usage import partitions
from billing.usage.tables import ClosedDay, MovedDay, UsageRetention
from core.clock import FakeClock
from core.database import Database
from tests.billing.audit.test_audit_faults import grant, record
from tests.billing.conftest import Deployment, deployment_of

KEY, NEWER = "a" * 32, "b" * 32


def close(made: Deployment, *keys: str) -> int:
    return len(reconcile.close_days(made.database, made.clock, keys))


def messages(made: Deployment, **options: Any) -> list[str]:
    with made.database.read() as session:
        return [each.message for each in signed_days_are_unchanged(session, **options)]


def open_audit(made: Deployment) -> reconcile.AuditReport:
    with made.database.snapshot() as session:
        return reconcile.audit(session, open_only=True, closed_days=None)


def unguarded(session: Session) -> None:
    """Let the transaction change append-only rows."""
    allow_maintenance(session)
    if session.get_bind().dialect.name == "sqlite":
        names = session.scalars(text("select name from sqlite_master where type = 'trigger'"))
        for name in names.all():
            session.execute(text(f"drop trigger {name}"))


def two_months(made: Deployment) -> None:
    """Tiers, credit, two tenants, a final invoice, closed days, then usage of an open day."""
    made.tenant("zeta")
    tiers = [{"up_to": 1_000_000, "price": "4"}, {"up_to": None, "price": "2"}]
    output = {"scheme": "graduated", "tiers": tiers}
    made.version = made.price({"output": output, "input": "1"}, model="tiered")
    with made.database.transaction() as session:
        grant(session, made)
    for _ in range(3):
        for tenant_id in ("acme", "zeta"):
            record(made, [made.event(tenant_id=tenant_id, output_tokens=400_000)])
        made.rate()
        made.clock.advance(days=15)
    invoice_run.run(made.database, made.clock, current=False)
    assert close(made) > 40
    made.clock.advance(days=1, hours=2)
    assert close(made) == 2, "it freezes the ledger entries that the first closing saw"
    with made.database.transaction() as session:
        grant(session, made, "again")
    for tenant_id in ("acme", "zeta"):
        record(made, [made.event(tenant_id=tenant_id, output_tokens=700_000)])
    made.rate()


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path
) -> tuple[Path, Deployment]:
    """The file of `two_months`, and the deployment that wrote it."""
    file = tmp_path_factory.mktemp("written") / "tollhouse.db"
    shutil.copy(migrated_sqlite, file)
    made = deployment_of(Database(f"sqlite:///{file}"), FakeClock())
    two_months(made)
    made.database.close()
    return file, made


@pytest.fixture
def months(written: tuple[Path, Deployment], sqlite_url: str) -> Iterator[Deployment]:
    """A copy of `two_months`, of this test's own."""
    file, made = written
    shutil.copy(file, sqlite_url.removeprefix("sqlite:///"))
    database = Database(sqlite_url)
    yield replace(made, database=database, clock=FakeClock(made.clock.now()))
    database.close()


def test_an_audit_of_open_days_needs_no_row_of_closed_ones(deployment: Deployment) -> None:
    two_months(deployment)
    assert open_audit(deployment).clean
    with deployment.database.transaction() as session:
        since = closing.open_usage(session)
        assert min(since.batch, since.entry, since.use) > 0
        unguarded(session)
        gone = {
            "charges": "request_id in (select request_id from usage_events where batch_id <= :batch)",
            "usage_events": "batch_id <= :batch",
            "engine_receipts": "request_id not in (select request_id from usage_events)",
            "ledger_entries": "id <= :entry",
            "credit_uses": "id <= :use",
        }
        numbers = {"batch": since.batch, "entry": since.entry, "use": since.use}
        for table, where in gone.items():
            used = {name: value for name, value in numbers.items() if f":{name}" in where}
            deleted = session.execute(text(f"delete from {table} where {where}"), used)
            assert deleted.rowcount > 0, table  # type: ignore[attr-defined]
    report = open_audit(deployment)
    assert report.differences == ()
    assert report.steps["events"]["count"] == 2
    assert report.steps["closed days"]["events"] == 6
    deployment.clock.advance(days=31)
    invoice_run.run(deployment.database, deployment.clock, current=False)
    assert open_audit(deployment).differences == (), "the invoice bills frozen and open charges"


_LAST = "(select max(request_id) from charges)"
OPEN_FAULTS = {
    "charges/prices": f"update charges set output_amount = output_amount + 1 where request_id = {_LAST}",
    "charges/ledger": f"update charges set amount = amount + 1 where request_id = {_LAST}",
    "charges/roll-ups": "update usage_daily set output_tokens = output_tokens + 1 where at ="
    " (select max(at) from usage_daily)",
    "hours": "update usage_hourly set amount = amount + 1 where at = (select max(at) from usage_hourly)",
    "tenant days": "update usage_tenant_daily set amount = amount + 1 where at ="
    " (select max(at) from usage_tenant_daily)",
    "ledger": "update ledger_entries set units = units + 1 where id ="
    " (select max(id) from ledger_entries)",
    "balance": "update ledger_accounts set balance = balance + 1 where kind = 'revenue'",
    "grants/uses": "update credit_uses set units = units + 1 where id ="
    " (select max(id) from credit_uses)",
    "events/charges": f"update charges set cached_tokens = cached_tokens + 1 where request_id = {_LAST}",
    "lost": f"delete from charges where request_id = {_LAST}",
}
_NAMED = {"hours": "charges/roll-ups", "tenant days": "charges/roll-ups", "balance": "ledger"}
_NAMED |= {"lost": "events/charges"}


@pytest.mark.parametrize("name", OPEN_FAULTS)
def test_a_fault_of_an_open_day_is_found_without_the_closed_rows(
    months: Deployment, name: str
) -> None:
    with months.database.transaction() as session:
        unguarded(session)
        changed = session.execute(text(OPEN_FAULTS[name]))
        assert changed.rowcount > 0  # type: ignore[attr-defined]
    assert _NAMED.get(name, name) in {each.check for each in open_audit(months).differences}


@pytest.mark.parametrize(
    ("statement", "finds"),
    [
        ("update charges set amount = amount + 1", "sums to"),
        ("update ledger_entries set units = units + 1 where id = 1", "ledger entries"),
        ("update credit_uses set units = units + 1 where id = 1", "credit uses"),
        ("update closed_charges set amount = amount + 1", "frozen groups"),
        ("update closed_units set units = units + 1", "frozen groups"),
        ("delete from closed_units", "frozen groups"),
    ],
)
def test_a_changed_row_of_a_closed_day_is_found(
    months: Deployment, statement: str, finds: str
) -> None:
    assert messages(months) == []
    with months.database.transaction() as session:
        unguarded(session)
        session.execute(text(statement))
    assert any(finds in each for each in messages(months)), messages(months)


def signed(made: Deployment) -> None:
    for number, keys in enumerate(((), (KEY,), (NEWER, KEY))):
        record(made, [made.event(output_tokens=1000 + number)])
        made.rate()
        made.clock.advance(days=1, hours=2)
        assert close(made, *keys) == 1


def test_closed_days_are_signed_and_keys_may_change(lite: Deployment) -> None:
    signed(lite)
    assert messages(lite, keys=(NEWER, KEY)) == messages(lite) == []
    (unknown,) = messages(lite, keys=(NEWER,))
    assert "TOLLHOUSE_CLOSING_KEYS lacks" in unknown
    assert close(lite) == 0
    record(lite, [lite.event()])
    lite.rate()
    lite.clock.advance(days=1, hours=2)
    assert close(lite) == 1
    (bare,) = messages(lite, keys=(NEWER, KEY))
    assert "is not signed" in bare, "days before it are"


def test_who_writes_the_database_alone_cannot_rewrite_a_day(lite: Deployment) -> None:
    """Rows, sums, groups and all digests fit together again; only the signature does not."""
    signed(lite)
    with lite.database.transaction() as session:
        unguarded(session)
        days = session.query(ClosedDay).order_by(ClosedDay.day).all()
        session.execute(
            text("update charges set amount = amount - 1 where request_id = (select max(request_id)"
                 " from charges)")
        )  # fmt: skip
        session.execute(text("update closed_charges set amount = amount - 1 where day = "
                             "(select max(day) from closed_charges)"))  # fmt: skip
        last = days[-1]
        last.sums = last.sums | {"units": last.sums["units"] - 1}
        groups = frozen_sums.stored_groups(session, last.day).digest()
        last.frozen = last.frozen | {"groups": groups}
        last.digest = closing._digest(days[-2].digest, last)
    assert messages(lite) == []
    (found,) = messages(lite, keys=(NEWER, KEY))
    assert "the signature of" in found


def test_a_daily_audit_reads_a_week_and_a_thirtieth_of_the_rest(
    lite: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(lite, [lite.event()])
    lite.rate()
    lite.clock.advance(days=100, hours=2)
    assert close(lite) == 100
    read: list[datetime] = []
    plain = frozen_sums.stored_groups
    monkeypatch.setattr(
        frozen_sums,
        "stored_groups",
        lambda session, day: read.append(day) or plain(session, day),
    )
    today = lite.clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
    seen = set()
    for number in range(30):
        read.clear()
        assert messages(lite, today=today + number * DAY) == []
        ago = sorted((today - day).days + number for day in read)
        first = number + 1  # days ago, of the latest closed one
        assert [n for n in ago if n <= 7] == list(range(first, 8))
        assert all(n % 30 == 0 for n in ago if n > 7)
        seen |= {*read}
    assert len(seen) == 100, "each day is read again within a month"


def test_an_audit_of_everything_sums_closed_and_open_days_apart(deployment: Deployment) -> None:
    """On both databases, which number the days of a row differently."""
    two_months(deployment)
    steps = {
        "usage_events": ("delete from usage_events", "the charge has no event"),
        "charges": ("update charges set amount = amount + 7", "was closed with"),
    }
    for table, (statement, wanted) in steps.items():
        for end in ("min", "max"):
            with deployment.database.transaction() as session:
                assert reconcile.audit(session).clean
                unguarded(session)
                one = f" where request_id = (select {end}(request_id) from {table})"
                session.execute(text(statement + one))
                found = [each.message for each in reconcile.audit(session).differences]
                session.rollback()
            closed_day = any("was closed with" in message for message in found)
            assert closed_day == (end == "min"), found
            assert end == "max" or any(wanted in message for message in found), found
            assert len(found) > 1, "the other checks of charges find it too"


def test_retention_waits_for_the_closing(lite: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(
        partitions, "drop_before", lambda session, keep_from, now: kept.append(keep_from) or 0
    )
    record(lite, [lite.event()])
    lite.rate()
    lite.clock.advance(days=100)
    with lite.database.transaction() as session:
        assert closing.drop_old_usage(session, 1, lite.clock.now()) == 0
    assert kept == [], "no day is closed"
    lite.clock.advance(hours=2)
    close(lite)
    lite.clock.advance(days=60)
    with lite.database.transaction() as session:
        closing.drop_old_usage(session, 1, lite.clock.now())
        last = closing.latest(session)
    assert last is not None and kept == [last.day + timedelta(days=1)]


def test_days_that_retention_has_dropped_do_not_wait_to_be_moved(lite: Deployment) -> None:
    first = lite.clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
    record(lite, [lite.event()])
    lite.rate()
    lite.clock.advance(days=12)
    assert close(lite) == 11
    now = lite.clock.now()

    def _waiting() -> tuple[int, int]:
        with lite.database.read() as session:
            found = moving.unmoved(session, now, keep_days=4)
        assert found.oldest is not None
        return found.days, (found.oldest - first).days

    assert _waiting() == (8, 0)
    with lite.database.transaction() as session:
        dropped = {"floor_id": "x", "kept_from": first + timedelta(days=3), "events": 1}
        session.add(UsageRetention(**dropped, dropped_at=now))
    assert _waiting() == (4, 4), "the day of the cut is not whole"
    with lite.database.transaction() as session:
        copied = {"after_batch": 1, "last_batch": 1, "store": "s", "floor_id": "x", "moved_at": now}
        session.add(MovedDay(day=first + timedelta(days=5), **copied))
    assert _waiting() == (2, 6)
