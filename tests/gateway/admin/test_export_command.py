"""`tollhouse export` and `tollhouse model` on a database of their own."""

import csv
import hashlib
import io
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from billing.exports import schedules
from billing.exports.subjects import Period
from billing.exports.tables import ExportJob, ExportSchedule
from core.clock import SystemClock
from core.database import Database
from core.settings import Settings
from gateway.catalog.model_files import sampling_defaults
from gateway.cli.doctor import storage
from gateway.cli.doctor.check import Health
from gateway.cli.main import main
from gateway.cli.serve.startup import prepare
from tests.migrated import migrated


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    database = migrated(Settings(data_dir=tmp_path).effective_database_url)
    prepare(Settings(data_dir=tmp_path), database, SystemClock())
    database.close()
    return tmp_path


def test_an_export_goes_to_a_file_whole(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = home / "out" / "ledger.csv"
    assert (
        main(["export", "run", "ledger", "--tenant", "demo", "--output", str(target), "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    data = target.read_bytes()
    assert told["sha256"] == hashlib.sha256(data).hexdigest()
    rows = list(csv.DictReader(io.StringIO(data.decode())))
    assert sum(float(row["units"]) for row in rows) == 0
    assert {row["account"] for row in rows} == {"promo", "promotion"}
    assert not list(target.parent.glob(".*.part"))


def test_focus_is_written_in_a_version_with_its_metadata(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = home / "focus.csv"
    words = ["export", "run", "focus", "--focus-version", "1.3", "--dataset", "contract-commitment"]
    assert main([*words, "--output", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "ContractCommitmentId" in target.read_text().splitlines()[0]
    about = json.loads(Path(told["metadata"]).read_text())
    assert about["Schema"]["FocusVersion"] == "1.3"
    for wrong in (["--focus-version", "1.7"], ["--dataset", "x"], ["--columns", "Colour"]):
        assert main(["export", "run", "focus", *wrong]) == 2
        assert wrong[1] in capsys.readouterr().err
    assert main(["export", "schedule", "focus", "--to", "books", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["focus_version"] == "1.4"
    change = ["export", "change", made["id"], "--focus-version", "1.2", "--json"]
    assert main(change) == 0
    assert json.loads(capsys.readouterr().out)["focus_version"] == "1.2"


def test_a_journal_and_a_trial_balance_are_written(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = told(capsys, "export", "trial-balance")
    assert {row["account"] for row in rows} == {"promo", "promotion"}
    assert sum(int(row["balance"]["units"]) for row in rows) == 0
    month, target = f"{SystemClock().now():%Y-%m}", home / "journal.csv"
    words = ["export", "journal", month, "--shape", "quickbooks", "--account", "promo=2199"]
    assert main([*words, "--output", str(target)]) == 0
    lines = list(csv.DictReader(io.StringIO(target.read_text())))
    assert [line["AccountName"] for line in lines] == ["2199", "6100"]
    assert lines[0]["Credits"] == lines[1]["Debits"] != ""


WRONG = (
    "journal 2026-13",
    "journal 2026-01 --account revenue",
    "journal 2026-01 --account sales=1",
    "run usage --from soon",
    "run usage --from 2026-02-01 --to 2026-01-01",
    "run usage --tenant nobody",
    "run usage --output /proc/nowhere/x",
)


def test_a_wrong_export_says_what_is_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in WRONG:
        assert main(["export", *wrong.split()]) == 2, wrong
        assert capsys.readouterr().err.startswith("tollhouse: "), wrong


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_parked_export_is_told_by_the_doctor_and_done_when_retried(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "export schedule ledger --to books --tenant demo --every month"
    made = told(capsys, *words.split())
    assert [row["id"] for row in told(capsys, "export", "schedules")] == [made["id"]]
    settings = Settings(data_dir=home)
    assert storage.exports(settings, SystemClock()).health is Health.GOOD
    database = Database(settings.effective_database_url)
    books = home / "exports" / "books"
    with database.transaction() as session:
        now = SystemClock().now()
        (schedule,) = session.scalars(select(ExportSchedule))
        session.add(
            schedules._job(schedule, Period(schedule.created_at, now + timedelta(days=1)), now)
        )
        session.execute(update(ExportJob).values(status="parked", error="OSError: it is full"))
    database.close()
    found = storage.exports(settings, SystemClock())
    assert (found.health, "books: OSError: it is full" in found.says) == (Health.BAD, True)
    assert "tollhouse export retry" in found.next_step
    books.rmdir()
    books.write_text("a file where a directory should be")
    assert told(capsys, "export", "retry", code=1)["failed"] == 1
    found = storage.exports(settings, SystemClock())
    assert (found.health, "books: " in found.says) == (Health.WARN, True)
    (job,) = told(capsys, "export", "jobs", "--status", "pending")
    assert job["attempts"] == 1 and "Error" in job["error"]
    books.unlink()
    database = Database(settings.effective_database_url)
    with database.transaction() as session:
        session.execute(update(ExportJob).values(status="parked"))
    database.close()
    assert told(capsys, "export", "retry", job["id"]) == {"retried": 1, "done": 1, "failed": 0}
    (job,) = told(capsys, "export", "jobs")
    assert (job["status"], Path(job["address"]).parent) == ("done", books)
    assert main(["export", "unschedule", made["id"]]) == 0
    assert told(capsys, "export", "schedules") == []
    assert storage.exports(settings, SystemClock()).health is Health.UNUSED


def test_the_models_are_listed_with_their_price(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "list", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert model["model"] == "tollhouse-demo"
    assert model["price"].startswith("price_")


def test_the_publisher_s_sampling_is_the_default(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": false, "top_p": 0.9, "max_new_tokens": 5}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.0, "top_p": 0.9}
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
