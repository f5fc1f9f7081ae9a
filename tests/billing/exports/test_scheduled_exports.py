"""Exports on a schedule: each span once, whole at its destination, parked with the reason."""

import csv
import hashlib
import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select

from billing import tasks
from billing.exports import schedules
from billing.exports.subjects import SUBJECTS, Period
from billing.exports.tables import ExportJob, ExportSchedule
from billing.notices import webhooks
from billing.reports import measures
from billing.stores import S3Store, Store, open_store
from core.errors import BadRequest, NotFound
from core.queue import TaskContext
from core.settings import Settings
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment
from tests.s3_server import s3_server

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    client = boto3.client("s3", endpoint_url=s3_address, region_name="us-east-1")
    client.create_bucket(Bucket="finance")
    return client


def planned(deployment: Deployment, settings: Settings, **changes: Any) -> str:
    given = {"what": "usage", "form": "csv", "destination": "out", "every": "day", **changes}
    with deployment.database.transaction() as session:
        return schedules.schedule(session, deployment.clock, stores(settings), **given).id


def stores(settings: Settings) -> schedules.StoreOf:
    return lambda destination: open_store(destination, settings)


def tick(deployment: Deployment, store_of: schedules.StoreOf) -> tuple[int, int]:
    """What the scheduled task does."""
    with deployment.database.transaction() as session:
        schedules.create_due_jobs(session, deployment.clock.now())
    return schedules.run_waiting(deployment.database, deployment.clock, store_of, scope_of_operator)


def jobs(deployment: Deployment) -> list[ExportJob]:
    with deployment.database.read() as session:
        return list(session.scalars(select(ExportJob).order_by(ExportJob.starts_at)))


def test_each_day_is_one_file_with_the_rows_of_that_day(
    deployment: Deployment, settings: Settings
) -> None:
    deployment.clock.set(START + timedelta(hours=9))
    planned(deployment, settings, tenant_id="acme")
    deployment.tenant("other")
    for _ in range(3):
        deployment.record(deployment.event(), deployment.event(tenant_id="other"))
        deployment.clock.advance(days=1)
    assert tick(deployment, stores(settings)) == (3, 0)
    assert tick(deployment, stores(settings)) == (0, 0), "a second tick has nothing to do"
    made = jobs(deployment)
    assert [job.starts_at for job in made] == [START + timedelta(days=n) for n in range(3)]
    for job in made:
        assert job.address is not None
        data = Path(job.address).read_bytes()
        (row,) = csv.DictReader(io.StringIO(data.decode()))
        assert row["tenant_id"] == "acme"
        assert row["occurred_at"].startswith(f"{job.starts_at:%Y-%m-%d}")
        assert (job.rows, job.bytes) == (1, len(data))
        assert job.sha256 == hashlib.sha256(data).hexdigest()
    assert Path(str(made[0].address)).parent == settings.data_dir / "exports" / "out"


@pytest.mark.parametrize(
    ("every", "spans"),
    [
        ("week", [("2026-02-23", "2026-03-02"), ("2026-03-02", "2026-03-09")]),
        ("month", [("2026-02-01", "2026-03-01")]),
    ],
)
def test_spans_follow_each_other_from_the_one_that_runs(
    lite: Deployment, settings: Settings, every: str, spans: list[tuple[str, str]]
) -> None:
    lite.clock.set(datetime(2026, 2, 25, 12, tzinfo=UTC))
    planned(lite, settings, every=every, delay_hours=5)
    lite.clock.set(datetime(2026, 3, 9, 4, 59, tzinfo=UTC))
    tick(lite, stores(settings))
    lite.clock.set(datetime(2026, 3, 9, 5, tzinfo=UTC))
    tick(lite, stores(settings))
    made = [(f"{job.starts_at:%Y-%m-%d}", f"{job.ends_at:%Y-%m-%d}") for job in jobs(lite)]
    assert made == spans


def test_a_file_in_an_s3_store_is_the_same_bytes(
    lite: Deployment, settings: Settings, bucket: Any, s3_address: str
) -> None:
    settings = settings.model_copy(update={"export_store_url": s3_address})
    lite.clock.set(START + timedelta(hours=1))
    planned(lite, settings, destination="s3://finance/books/", what="ledger", form="parquet")
    lite.record(lite.event())
    lite.rate()
    lite.clock.advance(days=1, hours=2)
    assert tick(lite, stores(settings)) == (1, 0)
    (job,) = jobs(lite)
    assert job.address == "s3://finance/books/ledger-all-20260101-20260102.parquet"
    found = bucket.get_object(Bucket="finance", Key="books/ledger-all-20260101-20260102.parquet")
    data = found["Body"].read()
    assert hashlib.sha256(data).hexdigest() == job.sha256 == found["Metadata"]["sha256"]
    with lite.database.read() as session:
        period = Period(job.starts_at, job.ends_at)
        assert job.rows == len(list(SUBJECTS["ledger"].rows(session, None, period))) > 0


@pytest.mark.parametrize(
    "destination", ["ftp://host/dir", "s3://", "/proc/nowhere", "s3://no-such-bucket/x", " "]
)
def test_a_destination_where_nothing_can_be_put_is_refused(
    lite: Deployment, settings: Settings, bucket: Any, s3_address: str, destination: str
) -> None:
    settings = settings.model_copy(update={"export_store_url": s3_address})
    with pytest.raises(BadRequest) as refused:
        planned(lite, settings, destination=destination)
    assert refused.value.param == "destination"
    with lite.database.read() as session:
        assert session.scalar(select(ExportSchedule.id)) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"what": "secrets"}, "what"),
        ({"form": "xlsx"}, "format"),
        ({"every": "hour"}, "every"),
        ({"delay_hours": -1}, "delay_hours"),
        ({"delay_hours": 4 * 7 * 24 + 1}, "delay_hours"),
    ],
)
def test_a_wrong_schedule_names_its_field(
    lite: Deployment, settings: Settings, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        planned(lite, settings, **change)
    assert refused.value.param == field


@pytest.mark.parametrize("hours", [0, 4 * 7 * 24])
def test_an_export_may_wait_for_late_usage_up_to_four_weeks(
    lite: Deployment, settings: Settings, hours: int
) -> None:
    planned(lite, settings, delay_hours=hours)
    with lite.database.read() as session:
        assert session.scalars(select(ExportSchedule)).one().options["delay_hours"] == hours


class Broken:
    """A store that is full until it is not."""

    def __init__(self, settings: Settings) -> None:
        self.full, self._settings = True, settings

    def __call__(self, destination: str) -> Store:
        if self.full:
            raise OSError(28, "No space left on device")
        return open_store(destination, self._settings)


def test_a_broken_destination_is_parked_with_the_reason_and_retried(
    deployment: Deployment, settings: Settings
) -> None:
    deployment.clock.set(START + timedelta(hours=1))
    planned(deployment, settings)
    deployment.clock.advance(days=1, hours=2)
    store = Broken(settings)
    for attempt in range(1, schedules.MAX_ATTEMPTS + 1):
        assert tick(deployment, store) == (0, 1)
        assert tick(deployment, store) == (0, 0), "not again before the pause is over"
        (job,) = jobs(deployment)
        assert job.attempts == attempt
        deployment.clock.advance(hours=2)
    assert (job.status, "No space left" in str(job.error)) == ("parked", True)
    assert tick(deployment, store) == (0, 0)
    with deployment.database.read() as session:
        assert "No space left" in str(session.scalar(select(ExportSchedule.last_error)))
    tasks.run_exports(TaskContext(settings, deployment.database, deployment.clock))
    measures.refresh(deployment.database, deployment.clock, events_days=7)
    assert REGISTRY.get_sample_value("tollhouse_parked_exports") == 1
    store.full = False
    with deployment.database.transaction() as session:
        assert schedules.retry(session, deployment.clock.now(), job.id) == 1
        with pytest.raises(NotFound):
            schedules.retry(session, deployment.clock.now(), "exp_nobody")
    assert tick(deployment, store) == (1, 0)
    (job,) = jobs(deployment)
    assert (job.status, job.error) == ("done", None)
    with deployment.database.read() as session:
        assert session.scalar(select(ExportSchedule.last_error)) is None
    tasks.run_exports(TaskContext(settings, deployment.database, deployment.clock))
    measures.refresh(deployment.database, deployment.clock, events_days=7)
    assert REGISTRY.get_sample_value("tollhouse_parked_exports") == 0


class Killed(BaseException):
    pass


def dies(_: str) -> Store:
    raise Killed


def test_a_job_whose_worker_died_is_done_by_another(
    deployment: Deployment, settings: Settings
) -> None:
    deployment.clock.set(START + timedelta(hours=1))
    planned(deployment, settings)
    deployment.clock.advance(days=1, hours=2)

    with pytest.raises(Killed):
        tick(deployment, dies)
    assert tick(deployment, stores(settings)) == (0, 0), "it may still be running"
    deployment.clock.advance(hours=1)
    assert tick(deployment, stores(settings)) == (1, 0)
    (job,) = jobs(deployment)
    assert (job.status, job.attempts) == ("done", 2)


def test_a_job_that_ends_every_worker_is_parked(lite: Deployment, settings: Settings) -> None:
    lite.clock.set(START + timedelta(hours=1))
    planned(lite, settings)
    lite.clock.advance(days=1, hours=2)
    for _ in range(schedules.MAX_ATTEMPTS):
        with pytest.raises(Killed):
            tick(lite, dies)
        lite.clock.advance(hours=1)
    assert tick(lite, dies) == (0, 1)
    lite.clock.advance(hours=1)
    assert tick(lite, dies) == (0, 0)
    (job,) = jobs(lite)
    assert (job.status, "worker died" in str(job.error)) == ("parked", True)


def test_a_slow_worker_does_not_undo_what_another_did(
    deployment: Deployment, settings: Settings
) -> None:
    deployment.clock.set(START + timedelta(hours=1))
    planned(deployment, settings)
    deployment.clock.advance(days=1, hours=2)

    def _slow(destination: str) -> Store:
        deployment.clock.advance(hours=1)  # its lease ends
        assert tick(deployment, stores(settings)) == (1, 0)
        raise OSError("and then it fails")

    assert tick(deployment, _slow) == (0, 1)
    (job,) = jobs(deployment)
    assert (job.status, job.error) == ("done", None)
    with deployment.database.read() as session:
        assert session.scalar(select(ExportSchedule.last_error)) is None


def test_an_ended_schedule_makes_nothing_more(lite: Deployment, settings: Settings) -> None:
    made = planned(lite, settings)
    with lite.database.transaction() as session:
        schedules.end(schedules.find(session, made), lite.clock.now())
        with pytest.raises(NotFound):
            schedules.find(session, made)
    lite.clock.advance(days=3)
    assert tick(lite, stores(settings)) == (0, 0)


def test_a_paused_schedule_leaves_out_what_fell_due_meanwhile(
    deployment: Deployment, settings: Settings
) -> None:
    deployment.clock.set(START + timedelta(hours=1))
    made = planned(deployment, settings)
    with deployment.database.transaction() as session:
        schedules.pause(schedules.find(session, made), deployment.clock.now())
    deployment.clock.advance(days=3)
    assert tick(deployment, stores(settings)) == (0, 0)
    with deployment.database.transaction() as session:
        schedules.resume(schedules.find(session, made), deployment.clock.now())
    assert tick(deployment, stores(settings)) == (0, 0), "two files fell due in the pause"
    deployment.clock.advance(hours=1)
    assert tick(deployment, stores(settings)) == (1, 0)
    assert [job.starts_at for job in jobs(deployment)] == [START + timedelta(days=2)]


@pytest.mark.parametrize(
    "folder", ["/etc", "../other", "a/../../b", "s3://bucket/x", "", ".hidden", "a//b", "a\nb"]
)
def test_a_tenant_schedules_into_folders_of_its_own_alone(
    lite: Deployment, settings: Settings, folder: str
) -> None:
    with pytest.raises(BadRequest) as refused, lite.database.transaction() as session:
        schedules.schedule_own(
            session,
            lite.clock,
            stores(settings),
            tenant_id="acme",
            what="usage",
            form="csv",
            destination=folder,
            every="day",
        )
    assert refused.value.param == "destination"


def test_a_directory_never_shows_half_a_file(tmp_path: Path, settings: Settings) -> None:
    store = open_store(str(tmp_path / "out"), settings)
    store.probe()
    with pytest.raises(OSError, match="No such file"):
        store.put("a.csv", tmp_path / "missing", "text/csv", "0")
    assert list((tmp_path / "out").iterdir()) == []
    assert isinstance(open_store("s3://finance", settings), S3Store)


def test_a_tenant_is_told_once_that_its_export_is_parked_and_once_that_it_is_done(
    deployment: Deployment, settings: Settings
) -> None:
    acme = scope_of_operator("acme")
    deployment.clock.set(START + timedelta(hours=1))
    with deployment.database.transaction() as session:
        webhooks.add(session, acme, deployment.clock, "https://all.example/hook")
    planned(deployment, settings, tenant_id="acme")
    deployment.record(deployment.event())
    deployment.clock.advance(days=1, hours=2)
    store = Broken(settings)

    def told() -> list[tuple[str, str | None]]:
        with deployment.database.read() as session:
            found = [each.payload for each in webhooks.deliveries(session, acme)]
        return [(str(each["event"]), each.get("reason")) for each in reversed(found)]

    for _ in range(schedules.MAX_ATTEMPTS):
        assert told() == []
        assert tick(deployment, store) == (0, 1)
        deployment.clock.advance(hours=2)
    parked = ("export.parked", "OSError: [Errno 28] No space left on device")
    assert told() == [parked]
    store.full = False
    with deployment.database.transaction() as session:
        schedules.retry(session, deployment.clock.now(), jobs(deployment)[0].id)
    assert tick(deployment, store) == (1, 0)
    assert told() == [parked, ("export.done", None)]
