"""Which tests execute which line, kept between runs: a test file is measured again when it changes."""

import difflib
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import progress

ROOT = Path(__file__).parents[2]
BATCH = 4  # test files that one process measures
_BATCH_S = 3600  # beside other work a test takes ten times as long


@dataclass(frozen=True, slots=True)
class TimedTest:
    name: str  # pytest's node id
    seconds: float

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


class CoverageMap:
    """`lines[file][line]` are the tests that execute it, by the file's present line numbers."""

    def __init__(self, lines: dict[str, dict[int, set[str]]], seconds: dict[str, float]) -> None:
        self._lines = lines
        self._seconds = seconds

    def tests_of(self, path: str, first: int, last: int) -> list[TimedTest]:
        lines = self._lines.get(path, {})
        return self._timed(
            {test for line in range(first, last + 1) for test in lines.get(line, ())}
        )

    def tests_of_file(self, path: str) -> list[TimedTest]:
        return self._timed({test for tests in self._lines.get(path, {}).values() for test in tests})

    def tests(self) -> list[TimedTest]:
        return self._timed(set(self._seconds))

    def runs_at_import(self, path: str, first: int, last: int) -> bool:
        lines = self._lines.get(path, {})
        return any("" in lines.get(line, ()) for line in range(first, last + 1))

    def _timed(self, names: set[str]) -> list[TimedTest]:
        return [TimedTest(name, self._seconds[name]) for name in sorted(names - {""})]


class MeasuredTests:
    """The cache file: by test file its tests, their seconds, and the lines that they executed."""

    def __init__(self, cache: Path, packages: Sequence[str]) -> None:
        self._cache = cache
        self._packages = packages
        self._kept: dict[str, Any] = {"files": {}, "sources": {}, "modules": []}
        if cache.exists():
            self._kept = json.loads(cache.read_text())

    @property
    def modules(self) -> list[str]:
        return list(self._kept["modules"])

    def measure(self, files: Sequence[str], minutes: float) -> bool:
        """False where time ran out; the next call goes on from there."""
        ends = time.monotonic() + 60 * minutes
        wanted = [file for file in files if not self._is_measured(file)]
        for start in range(0, len(wanted), BATCH):
            if time.monotonic() > ends:
                return False
            progress(f"{len(wanted) - start} of {len(files)} test files are still to be measured")
            self._measure_batch(wanted[start : start + BATCH])
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            self._cache.write_text(json.dumps(self._kept))
        return True

    @property
    def tests(self) -> set[str]:
        return {name for kept in self._kept["files"].values() for name in kept["tests"]}

    def map(self, files: Sequence[str]) -> CoverageMap:
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        seconds: dict[str, float] = {}
        moved = _Moved(self._kept["sources"])
        for file in files:
            kept = self._kept["files"].get(file)
            for name, test in _contexts(kept) if kept else ():
                seconds[name] = test["seconds"]
                for source, executed in test["lines"].items():
                    old = kept["sources"][source]
                    for line in moved.lines(source, old, executed):
                        lines[source][line].add(name)
        return CoverageMap(lines, seconds)

    def _is_measured(self, file: str) -> bool:
        kept = self._kept["files"].get(file)
        return kept is not None and kept["digest"] == digest((ROOT / file).read_text())

    def _measure_batch(self, files: Sequence[str]) -> None:
        with tempfile.NamedTemporaryFile(suffix=".json") as target:
            command = [sys.executable, "-m", "benchmarks.mutants.measure", target.name]
            subprocess.run(
                [*command, ",".join(self._packages), *files],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                timeout=_BATCH_S,
                check=True,
            )
            found = json.loads(Path(target.name).read_text())
        self._kept["modules"] = sorted({*self._kept["modules"], *found["modules"]})
        for file in files:
            tests = {n: t for n, t in found["tests"].items() if n.partition("::")[0] == file}
            sources = {source for test in tests.values() for source in test["lines"]}
            self._kept["files"][file] = {
                "at_import": found["at_import"],
                "digest": digest((ROOT / file).read_text()),
                "tests": tests,
                "sources": {
                    source: self._keep_source(source)
                    for source in sorted({*sources, *found["at_import"]})
                },
            }

    def _keep_source(self, source: str) -> str:
        text = (ROOT / source).read_text()
        self._kept["sources"][digest(text)] = text
        return digest(text)


class _Moved:
    """Line numbers of a source as it was measured, in the source as it is now. A line that is new
    counts as executed by whatever executed the line before it."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts
        self._known: dict[tuple[str, str], dict[int, list[int]]] = {}

    def lines(self, source: str, digest: str, executed: list[int]) -> list[int]:
        key = (source, digest)
        if key not in self._known:
            self._known[key] = self._moves(source, digest)
        return [new for old in executed for new in self._known[key].get(old, [])]

    def _moves(self, source: str, digest: str) -> dict[int, list[int]]:
        path = ROOT / source
        if not path.exists():
            return {}
        old, new = self._texts[digest].splitlines(), path.read_text().splitlines()
        moves: dict[int, list[int]] = defaultdict(list)
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for kind, old_start, old_end, new_start, new_end in matcher.get_opcodes():
            if kind == "equal":
                for step in range(old_end - old_start):
                    moves[old_start + step + 1].append(new_start + step + 1)
                continue
            for line in range(new_start + 1, new_end + 1):
                for before in {old_start, *range(old_start + 1, old_end + 1)}:
                    moves[before].append(line)
        return moves


def _contexts(kept: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The tests, and under an empty name what ran while they were collected."""
    return [*kept["tests"].items(), ("", {"seconds": 0.0, "lines": kept["at_import"]})]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
