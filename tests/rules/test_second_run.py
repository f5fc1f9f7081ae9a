"""A failure is judged again alone, and only a few are."""

from pathlib import Path

import pytest

from tests import second_run

_ONCE = """
import pathlib
def test_it():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
"""


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("def test_it(): pass", 0, ""),
        ("def test_it(): assert False", 1, "run again"),
        (_ONCE, 0, "UNSTEADY"),
        ("def test_it(:", 2, ""),
        ("import pytest\n@pytest.mark.parametrize('a', range(7))\ndef test_it(a): assert 0", 1, ""),
    ],
)
def test_what_fails_twice_has_failed(
    source: str,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "test_one.py").write_text(source)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert second_run.main(["-q", "test_one.py"]) == status
    assert said in (out := capfd.readouterr().out) and ("again" in out) == bool(said)
