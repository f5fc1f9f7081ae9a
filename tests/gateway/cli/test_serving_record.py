"""What commands beside a running server take for the served model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.clock import SystemClock
from core.settings import Settings
from engine.demo.paths import ADAPTERS
from gateway.cli.main import main
from gateway.cli.serve.startup import prepare
from gateway.serving.record import names_here, read_record, write_record
from tests.engine.checkpoints import save_adapter, save_checkpoint
from tests.migrated import migrated


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def record(directory: Path, pid: int, *models: str) -> None:
    told = {"url": "http://127.0.0.1:1", "pid": pid, "models": models, "source": ""}
    (directory / "serving.json").write_text(json.dumps(told))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    database = migrated(Settings(data_dir=tmp_path).effective_database_url)
    prepare(Settings(data_dir=tmp_path), database, SystemClock())
    database.close()
    return tmp_path


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_record(Settings(data_dir=tmp_path, model="/models/base"), "http://127.0.0.1:8123")
    found = read_record(tmp_path)
    assert found is not None and found.is_live
    assert (found.url, found.models, found.source) == (
        "http://127.0.0.1:8123",
        ("base",),
        "/models/base",
    )


@pytest.mark.parametrize("text", ["", "[]", '{"url": 1}', "\xff"])
def test_a_broken_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "serving.json").write_bytes(text.encode("latin-1"))
    assert read_record(tmp_path) is None
    assert names_here(Settings(data_dir=tmp_path)) == ("tollhouse-demo",)


def test_a_running_server_wins_over_the_settings_and_an_ended_one_over_the_default(
    tmp_path: Path,
) -> None:
    plain, named = Settings(data_dir=tmp_path), Settings(data_dir=tmp_path, model="/models/other")
    record(tmp_path, os.getpid(), "running")
    assert names_here(plain) == names_here(named) == ("running",)
    record(tmp_path, ended_pid(), "ended")
    assert names_here(plain) == ("ended",) and names_here(named) == ("other",)


def add(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    code = main(["adapter", "add", "mine", str(ADAPTERS["pirate"]), "--json", *options])
    told = capsys.readouterr()
    return code, json.loads(told.out) if code == 0 else told.err


def test_an_adapter_is_registered_on_the_served_model(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(home, os.getpid(), "served-one")
    code, made = add(capsys)
    assert code == 0 and made["base_model"] == "served-one"


def test_an_adapter_of_another_base_is_not_registered(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings name no model: the demo's."""
    other = save_checkpoint(tmp_path / "other")
    path = save_adapter(other, tmp_path / "adapter", rank=4, seed=1)
    assert main(["adapter", "add", "mine", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "lora_A.weight has shape [4, " in said and "the base model needs [rank, " in said
    assert main(["adapter", "list", "--json"]) == 0
    assert "mine" not in capsys.readouterr().out
    code, made = add(capsys)
    assert code == 0 and made["base_model"] == "tollhouse-demo"


def test_an_unknown_base_model_is_refused_with_the_known_ones(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(home, os.getpid(), "one", "two")
    code, said = add(capsys, "--base-model", "three")
    assert code == 2 and "'three'" in said and "known: one, two" in said
    code, said = add(capsys)
    assert code == 2 and "--base-model" in said
    code, made = add(capsys, "--base-model", "two")
    assert code == 0 and made["base_model"] == "two"
