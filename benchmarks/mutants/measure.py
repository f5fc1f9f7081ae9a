"""Runs test files under coverage, and writes which lines each test executed and how long it took.

python -m benchmarks.mutants.measure OUT PACKAGE,PACKAGE TEST_FILE...
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parents[2]
BETWEEN = (
    "between tests"  # what threads do then is nobody's; what collection imports has no context
)
OPTIONS = ("-q", "-p", "no:cacheprovider", "--tb=short", "-m", "not slow")


class Recorder:
    def __init__(self, measured: coverage.Coverage, packages: Sequence[str]) -> None:
        self._measured = measured
        self._folders = tuple(f"{ROOT}/{name}/" for name in packages)
        self.seconds: dict[str, float] = defaultdict(float)
        self.not_passed: set[str] = set()

    def pytest_collection_finish(self) -> None:
        self._measured.switch_context(BETWEEN)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._clear_caches()
        self._measured.switch_context(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self._measured.switch_context(BETWEEN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.not_passed.add(report.nodeid)

    def _clear_caches(self) -> None:
        """What an earlier test left in the caches of the measured functions would hide their lines."""
        for module in list(sys.modules.values()):
            if (getattr(module, "__file__", None) or "").startswith(self._folders):
                for each in vars(module).values():
                    if hasattr(each, "cache_clear"):
                        each.cache_clear()


def main() -> int:
    target, packages, *files = sys.argv[1:]
    measured = coverage.Coverage(
        data_file=None, include=[f"{ROOT}/{name}/*" for name in packages.split(",")]
    )
    recorder = Recorder(measured, packages.split(","))
    measured.start()
    pytest.main([*OPTIONS, *files], plugins=[recorder])
    measured.stop()
    lines = _lines_of_tests(measured.get_data())
    tests = {
        name: {"seconds": round(seconds, 3), "lines": lines.get(name, {})}
        for name, seconds in recorder.seconds.items()
        if name not in recorder.not_passed
    }
    at_import = lines.get("", {})
    Path(target).write_text(
        json.dumps({"tests": tests, "at_import": at_import, "modules": _third_party()})
    )
    return 0


def _lines_of_tests(data: coverage.CoverageData) -> dict[str, dict[str, list[int]]]:
    found: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    for file in data.measured_files():
        name = str(Path(file).relative_to(ROOT))
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                found[context][name].append(line)
    return found


def _third_party() -> list[str]:
    """What a warm process may import before it is known which module is changed."""
    return sorted(
        name
        for name, module in sys.modules.items()
        if (file := getattr(module, "__file__", None))
        and "site-packages" in file
        and "." not in name
        and not name.startswith("_")
    )


if __name__ == "__main__":
    sys.exit(main())
