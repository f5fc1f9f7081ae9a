"""A process that has imported what tests need, and judges each mutant in a fork of itself.

    python -m benchmarks.mutants.warm collected|imported PLAN REPLIES

`collected` has the whole suite collected and changes functions in place; `imported` has third-party
packages alone, so that a fork imports the changed module itself: for what runs at import. PLAN is a
JSON file, REPLIES a file descriptor; requests come on standard input, one JSON object a line.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from benchmarks.mutants.measure import OPTIONS
from benchmarks.mutants.mutate import Mutant
from benchmarks.mutants.replace import install

Note = Callable[[str, str], None]
Run = Callable[[Sequence[str], Note], None]

COLLECT_S = 240
END_S = 15  # for a failed test to give its database back
_MORE_MEMORY = 3 << 30
_SESSION_FIXTURES = ("migrated_sqlite", "migrated_postgres")
# Fast enough without capturing; a failing example is not made smaller.
_OPTIONS = (
    *OPTIONS,
    "-s",
    "--timeout=0",
    "--hypothesis-profile=mutants",
    "-Wignore::pytest.PytestAssertRewriteWarning",
)


class _Notes:
    """Tells which test runs, and the first that fails."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.failed = False

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = True
            self.note("failed", report.nodeid)


class _Collected:
    """Takes the place of pytest's loop over the collected tests."""

    def __init__(self, serve: Callable[[Run], None], seconds: dict[str, float]) -> None:
        self._serve = serve
        self._seconds = seconds
        self._items: dict[str, pytest.Item] = {}
        self._notes = _Notes(lambda kind, name: None)

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._notes)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._set_up_session()
        self._serve(self._run)
        return True

    def _set_up_session(self) -> None:
        """One test for each costly fixture of the session, which forks then find made."""
        for fixture in _SESSION_FIXTURES:
            users = [
                item
                for name, item in self._items.items()
                if fixture in getattr(item, "fixturenames", ()) and name in self._seconds
            ]
            if users:
                item = min(users, key=lambda each: self._seconds[each.nodeid])
                self._run_one(item, self._farthest(item))

    def _farthest(self, item: pytest.Item) -> pytest.Item:
        """The test with the fewest folders in common: what stays set up must suit every other."""
        chain = set(item.listchain())
        return min(self._items.values(), key=lambda each: len(chain.intersection(each.listchain())))

    def _run(self, names: Sequence[str], note: Note) -> None:
        self._notes.note, self._notes.failed = note, False
        items = [self._items[name] for name in names if name in self._items]
        # After the last one, too, what all tests share stays: a fork would take it from the others.
        rest = [*items[1:], self._farthest(items[-1])] if items else []
        for item, following in zip(items, rest, strict=True):
            self._run_one(item, following)
            if self._notes.failed:
                item.session._setupstate.teardown_exact(following)
                return
        note("done", "")

    def _run_one(self, item: pytest.Item, following: pytest.Item | None) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


class _Chosen(_Notes):
    """Runs the chosen tests alone, in the order given."""

    def __init__(self, names: Sequence[str], note: Note) -> None:
        super().__init__(note)
        self._order = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])


def _run_from_files(options: Sequence[str], names: Sequence[str], note: Note) -> None:
    files = sorted({name.partition("::")[0] for name in names})
    chosen = _Chosen(names, note)
    status = pytest.main([*options, "-x", *files], plugins=[chosen])
    if not chosen.failed:
        note("done" if status in (0, 5) else "failed", "")


def _serve(replies: int, run: Run) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        reply = _judge(request, run)
        os.write(replies, json.dumps(reply).encode() + b"\n")


def _judge(request: dict[str, Any], run: Run) -> dict[str, Any]:
    begun = time.monotonic()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(read)
            _in_child(request, run, write)
        os._exit(0)
    os.close(write)
    verdict, test = _watch(read, child, request["limits"])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    return {"verdict": verdict, "test": test, "seconds": round(time.monotonic() - begun, 2)}


def _in_child(request: dict[str, Any], run: Run, write: int) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MORE_MEMORY, size + _MORE_MEMORY))

    def _note(kind: str, name: str) -> None:
        os.write(write, json.dumps([kind, name]).encode() + b"\n")

    if request["mutant"] is not None and not install(Mutant(**request["mutant"])):
        _note("not installed", "")
        return
    run([name for name, _ in request["limits"]], _note)


def _watch(read: int, child: int, limits: list[tuple[str, float]]) -> tuple[str, str]:
    """("passed" | "failed" | "timed out" | "not installed" | "died", the test that decided)."""
    of_test = dict(limits)
    test, limit, rest = "", float(COLLECT_S), b""
    while True:
        ready, _, _ = select.select([read], [], [], limit)
        if not ready:
            return "timed out", test
        piece = os.read(read, 65536)
        if not piece:
            return "died", test
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            kind, name = json.loads(line)
            if kind == "start":
                test, limit = name, of_test.get(name, END_S)
            elif kind == "failed":
                _await_end(child)
                return "failed", name
            else:
                return ("passed" if kind == "done" else kind), ""


def _await_end(child: int) -> None:
    """Polls without reaping: the process group is still to be ended."""
    ends = time.monotonic() + END_S
    while time.monotonic() < ends:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.01)


def main() -> int:
    mode, plan_path, replies = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    plan = json.loads(plan_path.read_text())
    hypothesis.settings.register_profile(
        "mutants",
        deadline=None,
        derandomize=True,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    options = [*_OPTIONS, f"--basetemp={plan_path.parent / f'{mode}-{os.getpid()}'}"]
    if mode == "collected":
        served = _Collected(partial(_serve, replies), plan["seconds"])
        return int(pytest.main([*options, *plan["files"]], plugins=[served]))
    for name in plan["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    _serve(replies, partial(_run_from_files, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
