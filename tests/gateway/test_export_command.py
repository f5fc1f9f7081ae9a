"""`tollhouse export` and `tollhouse model` on a house of their own."""

import csv
import hashlib
import io
import json
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.settings import Settings
from gateway.cli import main
from gateway.first_start import prepare
from gateway.model_files import sampling_defaults


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from core.database import Database

    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    database = Database(Settings(data_dir=tmp_path).effective_database_url)
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


@pytest.mark.parametrize(
    "wrong",
    [
        ["run", "usage", "--from", "soon"],
        ["run", "usage", "--from", "2026-02-01", "--to", "2026-01-01"],
        ["run", "usage", "--tenant", "nobody"],
        ["run", "usage", "--output", "/proc/nowhere/x"],
    ],
)
def test_a_wrong_export_says_what_is_wrong(
    home: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *wrong]) == 2
    assert capsys.readouterr().err.startswith("tollhouse: ")


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
