"""A database restored from a backup: what the engines' receipt files still hold is billed again."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from core.clock import FakeClock
from core.database import Database
from core.settings import Settings
from gateway.cli.main import main
from gateway.metering import receipt_files as receipt_files_module
from gateway.metering.receipt_files import files_and_events, receipt_files
from tests.journeys.deployments import Command, RunningGateway, serve
from tests.journeys.test_kill import events_of

PROTECTS = ("gateway/metering", "engine/receipts.py", "billing/recovery")
_COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
_OWNER = ("tenant_id", "project_id", "key_id", "model", "price_version", "route", "kind")


def ask(deployment: RunningGateway, count: int, prompt: object = "Tell me of the toll.") -> None:
    for number in range(count):
        body = {"model": "tollhouse-demo", "prompt": prompt, "max_tokens": 3 + number}
        url = f"{deployment.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=deployment.headers, timeout=60)
        assert answer.status_code == 200, answer.text


def audit(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str, int]]:
    """The differences of `tollhouse audit`, which exits 1 where there are any."""
    capsys.readouterr()
    status = main(["audit", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (status == 0) == report["clean"] == (not report["differences"])
    return [(each["check"], each["kind"], each["count"]) for each in report["differences"]]


@pytest.mark.proof
def test_usage_that_a_restored_database_lacks_comes_from_receipts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, path = Command(tmp_path), tmp_path / "tollhouse.db"
    url = f"sqlite:///{path}"
    deployment = serve(command)
    try:
        ask(deployment, 3)
        assert command.json("audit")["lost"] == 0
        with (
            closing(sqlite3.connect(path)) as live,
            closing(sqlite3.connect(tmp_path / "bak")) as copy,
        ):
            live.backup(copy)
        ask(deployment, 3)
        ask(deployment, 1, ["One toll.", "Two tolls."])
        assert command.json("audit")["lost"] == 0  # everything is in the database
    finally:
        assert deployment.stop() == 0
    before = events_of(url)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    (tmp_path / "bak").replace(path)
    lost = before.keys() - events_of(url).keys()
    assert len(lost) == 4
    monkeypatch.setattr(receipt_files_module, "MIN_AGE_S", 0.0)
    for name, value in command.settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert audit(capsys) == [("receipt files/events", "lost", 4)]

    serve(command).stop()  # a start of the engine keeps the receipts
    assert lost == before.keys() - events_of(url).keys()
    settings, later = Settings(data_dir=tmp_path), FakeClock()
    later.advance(days=365 * 30)
    with closing(Database(url)) as database, database.snapshot() as session:
        (found,) = files_and_events(session, settings, later, receipt_files(settings))
    assert (found.kind, found.count) == ("lost", 4)
    words = ("recover", "--from-receipts", "--min-age", "0")
    assert command.json(*words, "--dry-run")["recovered"] == 4
    assert command.json(*words)["recovered"] == 4
    assert command.json(*words)["recovered"] == 0
    after = events_of(url)
    for name in lost:
        old, new = before[name], after[name]
        assert {k: new[k] for k in _COUNTS + _OWNER} == {k: old[k] for k in _COUNTS + _OWNER}
        assert new["settled_by"] == "receipt"
    report = command.json("audit")
    assert report["clean"], report
    assert audit(capsys) == []
    for file in receipt_files(settings):  # the engine has counted more than the gateway reported
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            if "receipt" in record:
                record["receipt"]["generated"] += 1
        file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    ((check, kind, count),) = audit(capsys)
    assert (check, kind) == ("receipt files/receipts", "amount") and count >= len(after)
