"""`tollhouse tenant plan-add` and `plans`."""

import json
from pathlib import Path

import pytest

from core.settings import Settings
from gateway.cli.main import main
from tests.migrated import migrated


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    migrated(Settings(data_dir=tmp_path).effective_database_url).close()


def test_a_plan_is_created_listed_and_subscribed_to(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--base-fee", "100", "--seat-fee", "9.99", "--interval", "year", "--in-advance"]
    assert main(["tenant", "plan-add", "pro", *terms, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["base_fee"]["amount"], made["seat_fee"]["amount"]) == ("100", "9.99")
    assert (made["interval"], made["in_advance"], made["currency"]) == ("year", True, "USD")
    assert main(["tenant", "plans", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [made]
    assert main(["tenant", "new", "acme"]) == 0
    capsys.readouterr()
    assert main(["tenant", "subscribe", "--tenant", "acme", "pro", "--json"]) == 0
    (subscription,) = json.loads(capsys.readouterr().out)
    assert subscription["plan"] == "pro"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--base-fee", "much"], "--base-fee much"),
        (["--seat-fee=-1"], "seat_fee is negative"),
        ([], "already exists"),
    ],
)
def test_a_wrong_plan_is_refused(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tenant", "plan-add", "basic"]) == 0
    capsys.readouterr()
    assert main(["tenant", "plan-add", "basic", *wrong]) == 2
    assert said in capsys.readouterr().err
    assert main(["tenant", "plans", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
