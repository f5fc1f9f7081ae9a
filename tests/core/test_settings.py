"""A wrong setting stops the start and names the variable; a wrong name is not forgiven."""

from pathlib import Path

import pytest

from core.errors import SettingError
from core.settings import load_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("TOLLHOUSE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_the_defaults_are_embedded() -> None:
    settings = load_settings()
    assert settings.port == 8000
    assert settings.effective_database_url.startswith("sqlite:///")
    assert settings.redis_url == settings.broker_url == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("PORT", "70000"),
        ("WORKERS", "0"),
        ("DTYPE", "int4"),
        ("MODERATION", "x"),
    ],
)
def test_a_wrong_value_names_its_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TOLLHOUSE_{name}", value)
    with pytest.raises(SettingError, match=f"TOLLHOUSE_{name}"):
        load_settings()


def test_a_misspelt_name_is_refused_with_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLHOUSE_PROT", "1")
    with pytest.raises(SettingError, match="TOLLHOUSE_PORT"):
        load_settings()


def test_the_environment_wins_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tollhouse.env").write_text("TOLLHOUSE_PORT=9001\nTOLLHOUSE_WORKERS=3\n")
    monkeypatch.setenv("TOLLHOUSE_PORT", "9002")
    settings = load_settings()
    assert (settings.port, settings.workers) == (9002, 3)


def test_the_file_is_not_forgiven_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tollhouse.env").write_text("TOLLHOUSE_WORKRES=3\n")
    with pytest.raises(SettingError, match="WORKRES"):
        load_settings()
    monkeypatch.setenv("TOLLHOUSE_ENV_FILE", str(tmp_path / "absent.env"))
    with pytest.raises(SettingError, match="TOLLHOUSE_ENV_FILE"):
        load_settings()


def test_paths_are_split_at_colons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLHOUSE_ADAPTER_DIRS", "/a:/b")
    assert load_settings().adapter_dirs == (Path("/a"), Path("/b"))
