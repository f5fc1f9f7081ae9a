"""The jobs of scheduled exports to the minute: when each is tried again, who holds it, what is told."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from billing.exports import schedules
from billing.exports.tables import ExportJob, ExportSchedule
from billing.exports.views import job_json, schedule_json
from billing.notices import webhooks
from billing.stores import DirectoryStore, S3Store, Store, open_store, own_folder
from core.errors import BadRequest, Conflict, NotFound
from core.settings import Settings
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment

NOON = datetime(2026, 1, 14, 12, 34, 56, 789, tzinfo=UTC)  # a Wednesday


class Full:
    def __call__(self, _destination: str) -> Store:
        raise OSError(28, "No space left on device.")


class Fine:
    """A store that keeps nothing, and says what it was given."""

    def __init__(self) -> None:
        self.put_: list[tuple[str, bytes, str, str]] = []

    def __call__(self, _destination: str) -> "Fine":
        return self

    def put(self, name: str, file: Path, media_type: str, sha256: str) -> str:
        self.put_.append((name, file.read_bytes(), media_type, sha256))
        return f"kept/{name}"

    def probe(self) -> None:
        """Always writable."""


def planned(deployment: Deployment, store: schedules.StoreOf, **changes: Any) -> str:
    given = {"what": "usage", "form": "csv", "destination": "out", "every": "day", **changes}
    with deployment.database.transaction() as session:
        return schedules.schedule(session, deployment.clock, store, **given).id


def tick(deployment: Deployment, store: schedules.StoreOf) -> tuple[int, int]:
    with deployment.database.transaction() as session:
        schedules.create_due_jobs(session, deployment.clock.now())
    return schedules.run_waiting(deployment.database, deployment.clock, store, scope_of_operator)


def job(deployment: Deployment) -> ExportJob:
    with deployment.database.read() as session:
        return session.scalars(select(ExportJob)).one()


@pytest.mark.parametrize(
    ("every", "first", "then"),
    [
        ("day", datetime(2026, 1, 15, 2, tzinfo=UTC), datetime(2026, 1, 16, 2, tzinfo=UTC)),
        ("week", datetime(2026, 1, 19, 2, tzinfo=UTC), datetime(2026, 1, 26, 2, tzinfo=UTC)),
        ("month", datetime(2026, 2, 1, 2, tzinfo=UTC), datetime(2026, 3, 1, 2, tzinfo=UTC)),
    ],
)
def test_a_schedule_runs_two_hours_after_its_period(
    lite: Deployment, every: str, first: datetime, then: datetime
) -> None:
    lite.clock.set(NOON)
    made = planned(lite, Fine(), every=every, tenant_id="acme")
    with lite.database.read() as session:
        row = session.get_one(ExportSchedule, made)
        assert row.created_at == NOON
        assert schedule_json(row) == {
            "id": made,
            "tenant_id": "acme",
            "what": "usage",
            "focus_version": None,
            "dataset": None,
            "columns": None,
            "format": "csv",
            "every": every,
            "delay_hours": 2,
            "destination": "out",
            "next_at": first.isoformat(),
            "paused_at": None,
            "last_error": None,
        }
    lite.clock.set(first - timedelta(microseconds=1))
    assert tick(lite, Fine()) == (0, 0)
    lite.clock.set(first)
    assert tick(lite, Fine()) == (1, 0)
    with lite.database.transaction() as session:
        row = session.get_one(ExportSchedule, made)
        assert row.next_at == then
        schedules.pause(row, NOON)
        schedules.pause(row, first)
        assert schedule_json(row)["paused_at"] == NOON.isoformat()
        schedules.resume(row, then)
        assert row.paused_at is None and row.next_at > then, "what is due at this moment is skipped"
        later = row.next_at
        schedules.resume(row, later + timedelta(days=99))
        assert row.next_at == later, "one that was not paused keeps its time"


def test_a_failing_export_is_tried_six_times_at_doubling_pauses(lite: Deployment) -> None:
    lite.clock.set(NOON)
    planned(lite, Fine())
    lite.clock.set(datetime(2026, 1, 15, 2, tzinfo=UTC))
    for attempt, minutes, status in (
        (1, 2, "pending"),
        (2, 4, "pending"),
        (3, 8, "pending"),
        (4, 16, "pending"),
        (5, 32, "pending"),
        (6, 60, "parked"),
    ):
        assert tick(lite, Full()) == (0, 1)
        made = job(lite)
        assert (made.attempts, made.status) == (attempt, status)
        assert made.next_at == lite.clock.now() + timedelta(minutes=minutes)
        assert made.error == "OSError: [Errno 28] No space left on device"
        lite.clock.advance(minutes=minutes)
    with lite.database.transaction() as session:
        assert schedules.parked(session) == 1
        with pytest.raises(NotFound, match="There is no parked export 'exp_other'"):
            schedules.retry(session, NOON, "exp_other")
        assert schedules.retry(session, NOON) == 1
        assert schedules.retry(session, NOON) == 0, "without a name, none is no error"
        assert schedules.parked(session) == 0
    made = job(lite)
    assert (made.status, made.attempts, made.next_at) == ("pending", 0, NOON)


def test_a_worker_holds_a_job_for_an_hour_and_six_that_die_are_enough(lite: Deployment) -> None:
    lite.clock.set(NOON)
    planned(lite, Fine())
    lite.clock.set(datetime(2026, 1, 15, 2, tzinfo=UTC))

    def _dies(_: str) -> Store:
        raise KeyboardInterrupt

    for attempt in range(1, 7):
        with pytest.raises(KeyboardInterrupt):
            tick(lite, _dies)
        made = job(lite)
        assert (made.attempts, made.status) == (attempt, "running")
        assert made.next_at == lite.clock.now() + timedelta(hours=1)
        lite.clock.advance(minutes=59, seconds=59)
        assert tick(lite, Fine()) == (0, 0)
        lite.clock.advance(seconds=1)
    assert tick(lite, Fine()) == (0, 1)
    made = job(lite)
    reason = "RuntimeError: its worker died 6 times; check the worker's memory and disk"
    assert (made.status, made.error) == ("parked", reason)


def test_a_finished_job_and_what_its_tenant_is_told(lite: Deployment) -> None:
    lite.clock.set(NOON)
    acme = scope_of_operator("acme")
    with lite.database.transaction() as session:
        webhooks.add(session, acme, lite.clock, "https://all.example/hook")
    made, store = planned(lite, Fine(), tenant_id="acme", what="ledger"), Fine()
    lite.clock.set(datetime(2026, 1, 15, 2, tzinfo=UTC))
    assert tick(lite, store) == (1, 0)
    ((name, data, media_type, digest),) = store.put_
    assert name == "ledger-acme-20260114-20260115.csv"
    assert media_type == "text/csv; charset=utf-8" and data.endswith(b"units,currency\r\n")
    done = job(lite)
    assert job_json(done) == {
        "id": done.id,
        "schedule_id": made,
        "tenant_id": "acme",
        "what": "ledger",
        "format": "csv",
        "start": "2026-01-14T00:00:00+00:00",
        "end": "2026-01-15T00:00:00+00:00",
        "status": "done",
        "attempts": 1,
        "rows": 0,
        "bytes": len(data),
        "sha256": digest,
        "address": "kept/ledger-acme-20260114-20260115.csv",
        "error": None,
        "done_at": "2026-01-15T02:00:00+00:00",
    }
    with lite.database.read() as session:
        (told,) = webhooks.deliveries(session, acme)
        said = {key: told.payload[key] for key in ("event", "export_id", "what", "format")}
        assert said == {
            "event": "export.done",
            "export_id": done.id,
            "what": "ledger",
            "format": "csv",
        }
        span = [told.payload[key] for key in ("start", "end", "rows", "sha256")]
        assert span == ["2026-01-14T00:00:00+00:00", "2026-01-15T00:00:00+00:00", 0, digest]
        assert told.subject == "Export of ledger, 2026-01-14 to 2026-01-15"


def test_the_oldest_waiting_job_is_done_first_and_those_of_the_operator_tell_nobody(
    lite: Deployment,
) -> None:
    lite.clock.set(NOON)
    for what in ("usage", "charges", "ledger"):
        planned(lite, Fine(), what=what)
    lite.clock.set(datetime(2026, 1, 16, 2, tzinfo=UTC))
    with lite.database.transaction() as session:
        schedules.create_due_jobs(session, lite.clock.now())
        waiting = session.scalars(select(ExportJob).order_by(ExportJob.id)).all()
        assert len(waiting) == 6 and {each.next_at for each in waiting} == {lite.clock.now()}
        waiting[4].next_at -= timedelta(minutes=1)
        wanted = [waiting[4], *waiting[:4], waiting[5]]
        names = [
            f"{each.what}-all-{each.starts_at:%Y%m%d}-{each.ends_at:%Y%m%d}" for each in wanted
        ]
    store = Fine()
    assert tick(lite, store) == (6, 0)
    assert [each[0] for each in store.put_] == [f"{name}.csv" for name in names]


def test_schedules_are_listed_and_found_by_their_tenant(lite: Deployment) -> None:
    lite.tenant("birch")
    ours, theirs, ended, mine = (
        planned(lite, Fine(), tenant_id=tenant) for tenant in ("acme", "birch", "acme", "acme")
    )
    with lite.database.transaction() as session:
        schedules.end(schedules.find(session, ended), NOON)
        schedules.pause(schedules.find(session, mine, "acme"), NOON)

        def _ids(found: Iterable[ExportSchedule]) -> list[str]:
            return [each.id for each in found]

        assert _ids(schedules.open_schedules(session)) == sorted([ours, theirs, mine])
        assert _ids(schedules.open_schedules(session, "acme")) == sorted([ours, mine])
        assert schedules.find(session, theirs).id == theirs
        for name, tenant in ((theirs, "acme"), (ended, "acme"), (ended, None), ("x", None)):
            with pytest.raises(NotFound, match=f"There is no schedule '{name}'"):
                schedules.find(session, name, tenant)
        assert session.get_one(ExportSchedule, ended).ended_at == NOON


def test_a_tenant_has_twenty_schedules_at_most(lite: Deployment) -> None:
    lite.tenant("birch")
    planned(lite, Fine(), tenant_id="birch")
    made = [planned(lite, Fine(), tenant_id="acme") for _ in range(20)]

    def _own() -> ExportSchedule:
        with lite.database.transaction() as session:
            given = {"what": "usage", "form": "csv", "destination": "books/daily", "every": "day"}
            return schedules.schedule_own(session, lite.clock, Fine(), tenant_id="acme", **given)

    with pytest.raises(Conflict, match="The tenant has 20 export schedules, the maximum"):
        _own()
    with lite.database.transaction() as session:
        schedules.end(schedules.find(session, made[0]), NOON)
    last = _own()
    assert (last.tenant_id, last.destination) == ("acme", "tenants/acme/books/daily")
    assert last.options == {"delay_hours": 2}


def test_a_destination_that_fails_says_why(lite: Deployment) -> None:
    class Long(Full):
        def __call__(self, _destination: str) -> Store:
            raise OSError("x" * 600)

    for store, reason in (
        (Full(), "[Errno 28] No space left on device."),
        (Long(), f"{'x' * 491}."),
    ):
        with pytest.raises(BadRequest) as told:
            planned(lite, store)
        next_step = "Make it writable, or choose another destination."
        assert str(told.value) == f"out is not writable: OSError: {reason} {next_step}"


def test_stores_by_destination(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, export_store_url="http://store")
    assert open_store("s3://books/a/b/", settings) == S3Store("books", "a/b", "http://store")
    assert open_store("s3://books", settings) == S3Store("books", "", "http://store")
    assert open_store("out", settings) == DirectoryStore(tmp_path / "exports" / "out")
    assert open_store("/srv/out", settings) == DirectoryStore(Path("/srv/out"))
    for wrong, said in (("s3:///a", "names no bucket"), ("ftp://a", "is not a destination")):
        with pytest.raises(BadRequest, match=f"'{wrong}' {said}") as told:
            open_store(wrong, settings)
        assert told.value.param == "destination"
    chosen = Settings(data_dir=tmp_path, export_dir=tmp_path / "elsewhere")
    assert open_store("out", chosen) == DirectoryStore(tmp_path / "elsewhere" / "out")
    assert own_folder("acme", "f" * 200) == f"tenants/acme/{'f' * 200}"
    with pytest.raises(BadRequest) as told:
        own_folder("acme", "f" * 201)
    assert str(told.value).startswith(f"'{'f' * 80}' is not a valid folder name.")


def test_a_directory_keeps_whole_files_and_nothing_of_a_probe(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"1,2\r\n")
    store = DirectoryStore(tmp_path / "deep" / "out")
    store.probe()
    assert list(store.folder.iterdir()) == []
    store.probe()
    address = store.put("a/b.csv", source, "text/csv", "0")
    assert address == str(store.folder / "a" / "b.csv")
    source.write_bytes(b"3\r\n")
    store.put("a/b.csv", source, "text/csv", "0")
    assert Path(address).read_bytes() == b"3\r\n"
    assert [each.name for each in Path(address).parent.iterdir()] == ["b.csv"]
    assert source.exists()


def test_the_client_of_a_store_waits_five_seconds_for_a_connection_and_tries_twice() -> None:
    own = S3Store("books", "a", "http://store").client().meta.config
    assert (own.connect_timeout, own.read_timeout) == (5, 7)
    assert own.retries["total_max_attempts"] == 2 and own.retries["mode"] == "standard"
    assert own.s3["addressing_style"] == "path"
    assert "addressing_style" not in (S3Store("books", "a").client().meta.config.s3 or {})
