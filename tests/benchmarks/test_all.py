"""`make bench` runs every benchmark, and one that fails does not stop the rest."""

import subprocess
import sys

import pytest

from benchmarks import __main__ as bench


def test_every_benchmark_is_found() -> None:
    found = bench.names()
    assert {"engine", "gateway", "billing", "moderation", "routing", "simulate"} <= set(found)
    assert "report" not in found and "__main__" not in found


def test_a_failure_is_told_and_does_not_stop_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def _run(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, int(command[-1] == "benchmarks.b"))

    monkeypatch.setattr(bench, "names", lambda: ["a", "b", "c"])
    monkeypatch.setattr(subprocess, "run", _run)
    assert bench.main() == 1
    assert ran == [[sys.executable, "-m", f"benchmarks.{name}"] for name in "abc"]
    assert "failed: b" in capsys.readouterr().err
