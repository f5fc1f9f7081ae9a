"""Which tests execute which line: one run of the tests under coverage with a context a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

COVERAGE = ("--cov", "--cov-context=test", "--cov-report=")


def tests_by_line(
    tree: Path, files: list[str], tests: list[str], scratch: Path
) -> dict[str, dict[int, list[str]]]:
    """For each file and line the pytest node ids in which the line ran, set-up included.
    RuntimeError where the tests fail before anything is changed."""
    data = scratch / "coverage.db"
    config = scratch / "coveragerc"
    config.write_text(f"[run]\ndata_file = {data}\nsource = .\n")
    base = [sys.executable, "-m"]
    ran = subprocess.run(
        [
            *base,
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *tests,
            *COVERAGE,
            f"--cov-config={config}",
        ],
        cwd=tree,
        env={**os.environ, "COVERAGE_FILE": str(data)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(
            f"the tests fail without any mutant:\n{(ran.stdout + ran.stderr)[-3000:]}"
        )
    report = scratch / "coverage.json"
    subprocess.run(
        [
            *base,
            "coverage",
            "json",
            "-q",
            f"--rcfile={config}",
            "--show-contexts",
            "-o",
            str(report),
        ],
        cwd=tree,
        check=True,
    )
    found = json.loads(report.read_text())["files"]
    return {name: _tests_of(found[name]["contexts"]) for name in files if name in found}


def _tests_of(contexts: dict[str, list[str]]) -> dict[int, list[str]]:
    """A context is `tests/x.py::test_y|run`, or empty for what ran at import."""
    return {
        int(line): sorted({name.rpartition("|")[0] for name in names if name})
        for line, names in contexts.items()
    }
