"""The command line as a whole: what its commands import, and a database that is not ready."""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.admin.console import units_of_amount
from gateway.cli.main import COMMANDS, command_module, command_names, main
from migrations.run import downgrade
from tests.migrated import migrated

ROOT = Path(__file__).parents[3]
# Each costs a start 0.1 to 2 s; only what a verb really does may import them.
_SLOW = {"alembic", "celery", "fastapi", "numpy", "psycopg", "stripe", "torch", "weasyprint"}


def _imported(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*{{n.partition('.')[0] for n in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_commands_start_without_the_slow_packages() -> None:
    # `doctor` looks at every part of the system.
    found = _imported(*(module for name, module in COMMANDS.items() if name != "doctor"))
    assert "sqlalchemy" in found
    assert found & _SLOW == set()


def test_a_model_is_fetched_without_a_database() -> None:
    assert "sqlalchemy" not in _imported("gateway.cli.main", "gateway.admin.models")


def test_a_gateway_imports_the_clients_of_what_is_configured() -> None:
    found = _imported("gateway.cli.serve.serving", "gateway.wiring", "gateway.cli.serve.startup")
    assert "fastapi" in found
    assert found & {"authlib", "boto3", "celery", "psycopg", "redis", "stripe", "torch"} == set()


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in {id(found): found for found in action.choices.values()}.values():
                yield from _options(each)


def test_amount_has_one_unit_in_all_commands() -> None:
    found = []
    for name in command_names():
        module = command_module(name)
        parser = argparse.ArgumentParser()
        if hasattr(module, "configure"):
            module.configure(parser)
        helps = [each.help for each in _options(parser) if "--amount" in each.option_strings]
        found += helps
        assert not helps or module.units_of_amount is units_of_amount, name
    assert found and all(str(each).startswith("in major units") for each in found)
    assert units_of_amount("12.5") == 12_500_000_000_000


@pytest.mark.parametrize("command", ["tenant list", "price list", "invoice list", "audit"])
def test_an_empty_database_is_named_with_the_next_step(
    command: str,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", database_url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert main(command.split()) == 2
    problem, step = capsys.readouterr().err.splitlines()
    assert "does not have this version's schema" in problem
    assert step.startswith("Run `tollhouse migrate`")


def test_an_older_schema_is_named_too(
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    database = migrated(database_url)
    downgrade(database, "0001_core")
    database.close()
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", database_url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert main(["invoice", "list"]) == 2
    assert "does not have this version's schema" in capsys.readouterr().err
    assert main(["migrate"]) == 0
    assert main(["invoice", "list"]) == 0


def test_a_password_of_the_database_is_not_shown(
    postgres_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TOLLHOUSE_DATABASE_URL",
        postgres_url.replace("postgresql://root@", "postgresql://root:hunter2@"),
    )
    assert main(["tenant", "list"]) == 2
    shown = capsys.readouterr().err
    assert "***" in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize("options", [["--to", "9999"], ["--to", "9999", "--down", "--yes"]])
def test_an_unknown_revision_is_named(
    options: list[str],
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert main(["migrate", *options]) == 2
    problem, step = capsys.readouterr().err.splitlines()
    assert "cannot be changed to '9999'" in problem
    assert "0001_core" in step
