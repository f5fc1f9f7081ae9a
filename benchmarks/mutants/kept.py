"""Verdicts of earlier calls, by what the mutant is and by the statement that it changes."""

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from benchmarks.mutants.coverage_map import digest
from benchmarks.mutants.judge import KILLED, TIMED_OUT, Verdict
from benchmarks.mutants.mutate import Mutant

ROOT = Path(__file__).parents[2]


class KeptVerdicts:
    """A mutant that was killed stays so while the test that killed it exists. One that survived is
    asked again, of the tests that did not see it yet or have changed since."""

    def __init__(self, path: Path, tests: Collection[str]) -> None:
        self._path = path
        self._tests = tests
        self._digests: dict[str, str] = {}
        self._verdicts: dict[str, Verdict] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            self._verdicts[entry["mutant"]] = self._as_of_now(entry)

    def __len__(self) -> int:
        return len(self._verdicts)

    def verdict(self, mutant: Mutant) -> Verdict | None:
        return self._verdicts.get(_key(mutant))

    def is_killed(self, mutant: Mutant) -> bool:
        found = self.verdict(mutant)
        return (
            found is not None
            and found.result in (KILLED, TIMED_OUT)
            and (not found.test or found.test in self._tests)
        )

    def passed(self, mutant: Mutant) -> tuple[str, ...]:
        found = self.verdict(mutant)
        return found.passed if found is not None else ()

    def keep(self, mutant: Mutant, verdict: Verdict) -> None:
        self._verdicts[_key(mutant)] = verdict
        files = {name.partition("::")[0] for name in verdict.passed}
        entry = {
            "mutant": _key(mutant),
            "verdict": asdict(verdict),
            "files": {file: self._digest(file) for file in sorted(files)},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _as_of_now(self, entry: dict[str, dict[str, object]]) -> Verdict:
        names: list[str] = entry["verdict"].pop("passed")  # type: ignore[assignment]
        files = entry["files"]
        passed = (n for n in names if files[f := n.partition("::")[0]] == self._digest(f))
        return Verdict(**entry["verdict"], passed=tuple(passed))  # type: ignore[arg-type]

    def _digest(self, file: str) -> str:
        if file not in self._digests:
            path = ROOT / file
            self._digests[file] = digest(path.read_text()) if path.exists() else ""
        return self._digests[file]


def _key(mutant: Mutant) -> str:
    source = (ROOT / mutant.path).read_text().splitlines()
    text = "\n".join(source[mutant.statement - 1 : mutant.statement_end])
    return f"{mutant.path}:{mutant.line}:{mutant.start}:{mutant.before}:{mutant.after}:{text}"
