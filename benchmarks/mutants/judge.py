"""Which tests judge a mutant, in which order, and the verdict."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutants.coverage_map import CoverageMap, TimedTest
from benchmarks.mutants.mutate import Mutant
from benchmarks.mutants.replace import is_inside_function
from benchmarks.report import progress

ROOT = Path(__file__).parents[2]
_SLOWER = 5  # a test that takes so many times as long as it did is not waited for
_FIRST_OF_A_FILE = 6  # before the next file's: most mutants fail in the first test that sees them
KILLED, SURVIVED, TIMED_OUT, NOT_EXECUTED = "killed", "survived", "timed out", "not executed"


@dataclass(frozen=True, slots=True)
class Verdict:
    result: str
    test: str = ""  # the one that failed or took too long
    passed: tuple[str, ...] = ()  # tests that execute the line and see nothing
    left: int = 0  # tests that execute the line and had no time yet
    seconds: float = 0.0


class WarmProcess:
    """One of benchmarks.mutants.warm; started by the first mutant that needs it."""

    def __init__(self, mode: str, plan: Path, least_s: float) -> None:
        """No test is given less than `least_s`: other work on the machine is no fault."""
        self._least_s = least_s
        self._command = [sys.executable, "-m", "benchmarks.mutants.warm", mode, str(plan)]
        self._process: subprocess.Popen[str] | None = None
        self._replies = -1
        self._read = b""

    def ask(self, mutant: Mutant | None, tests: Sequence[TimedTest]) -> dict[str, Any]:
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        limits = [(test.name, max(self._least_s, _SLOWER * test.seconds)) for test in tests]
        request = {"mutant": None if mutant is None else asdict(mutant), "limits": limits}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        while b"\n" not in self._read:
            piece = os.read(self._replies, 65536)
            if not piece:
                raise RuntimeError(
                    f"{' '.join(self._command[2:4])} ended: the tests cannot be collected. "
                    "Run pytest on them to see why."
                )
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        os.close(self._replies)

    def _start(self) -> subprocess.Popen[str]:
        self._replies, write = os.pipe()
        process = subprocess.Popen(
            [*self._command, str(write)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[write],
            text=True,
        )
        os.close(write)
        return process


class Judge:
    def __init__(
        self,
        lines: CoverageMap,
        own: Sequence[str],
        seconds: float,
        processes: Sequence[WarmProcess],
    ) -> None:
        """`own` are the folders of tests that are asked first, `seconds` what one mutant may take
        while nothing fails, in the time that the tests take unchanged."""
        self._lines = lines
        self._own = tuple(own)
        self._seconds = seconds
        self._collected, self._imported = processes
        self._sound: dict[str, bool] = {}

    def judge(self, mutant: Mutant, passed: Collection[str] = ()) -> Verdict:
        """`passed` are tests that are known not to see it: the time goes to others."""
        source = (ROOT / mutant.path).read_bytes()
        place = (mutant.path, mutant.statement, mutant.statement_end)
        at_import = self._lines.runs_at_import(*place) or not is_inside_function(mutant, source)
        found = (
            self._lines.tests_of_file(mutant.path) if at_import else self._lines.tests_of(*place)
        )
        if at_import and not found:  # only declarations: no test runs a line, and any may see it
            found = self._lines.tests()
        process = self._imported if at_import else self._collected
        return self._by(process, mutant, found, {each.name for each in found}.intersection(passed))

    def control(self, mutant: Mutant) -> Verdict:
        """The same tests in the same order with nothing changed: none may fail."""
        place = (mutant.path, mutant.statement, mutant.statement_end)
        tests = self._chosen(self._lines.tests_of(*place), self._seconds)
        if not tests:
            return Verdict(NOT_EXECUTED)
        reply = self._collected.ask(None, tests)
        result = SURVIVED if reply["verdict"] == "passed" else KILLED
        return Verdict(result, reply["test"], seconds=reply["seconds"])

    def _by(
        self, process: WarmProcess, mutant: Mutant, found: list[TimedTest], passed: set[str]
    ) -> Verdict:
        spent, budget = 0.0, self._seconds
        while True:
            able = [
                test
                for test in found
                if self._sound.get(test.name, True) and test.name not in passed
            ]
            tests = self._chosen(able, budget)
            if not tests:
                result = SURVIVED if passed else NOT_EXECUTED
                return Verdict(result, passed=tuple(sorted(passed)), seconds=spent)
            reply = process.ask(mutant, tests)
            spent += reply["seconds"]
            if reply["verdict"] == "passed":
                passed |= {test.name for test in tests}
                left = len(able) - len(tests)
                return Verdict(SURVIVED, "", tuple(sorted(passed)), left, spent)
            if reply["verdict"] == "not installed":
                found = self._lines.tests_of_file(mutant.path)
                return self._by(self._imported, mutant, found, passed)
            if self._passes_unchanged(process, reply["test"], tests):
                result = TIMED_OUT if reply["verdict"] == "timed out" else KILLED
                return Verdict(result, reply["test"], seconds=spent)
            names = [test.name for test in tests]
            if reply["test"] in names:  # those before the unsound one have passed
                before = tests[: names.index(reply["test"])]
                passed |= {test.name for test in before}
                budget -= sum(test.seconds for test in before)

    def _passes_unchanged(self, process: WarmProcess, name: str, tests: list[TimedTest]) -> bool:
        """A test that fails by itself in a fork decides nothing, and is not asked again. No name:
        the files could not be collected, which is asked of each list of them."""
        named = [test for test in tests if test.name == name] or tests[:1]
        key = named[0].name
        if key not in self._sound:
            self._sound[key] = process.ask(None, named)["verdict"] == "passed"
            if not self._sound[key]:
                progress(f"{key} fails in a fork with nothing changed, and is not asked")
        return self._sound[key]

    def _chosen(self, tests: list[TimedTest], budget: float) -> list[TimedTest]:
        files: dict[str, list[TimedTest]] = defaultdict(list)
        for test in sorted(tests, key=lambda each: (each.seconds, each.name)):
            files[test.file].append(test)
        grouped = sorted(
            files.values(),
            key=lambda each: (not each[0].file.startswith(self._own), each[0].seconds),
        )
        ordered = [test for group in grouped for test in group[:_FIRST_OF_A_FILE]]
        ordered += [test for group in grouped for test in group[_FIRST_OF_A_FILE:]]
        chosen: list[TimedTest] = []
        spent = 0.0
        for test in ordered:
            spent += test.seconds
            if chosen and spent > budget:
                break
            chosen.append(test)
        return chosen
