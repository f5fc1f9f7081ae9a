"""The mutator on a planted package: what its tests see is killed, what they do not see survives."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants import kept, replace
from benchmarks.mutants.equivalent import judged_equivalent, listed_in
from benchmarks.mutants.judge import Verdict
from benchmarks.mutants.kept import KeptVerdicts
from benchmarks.mutants.mutate import mutants_of
from benchmarks.mutation import interval
from billing import differences

ROOT = Path(__file__).parents[2]
SOURCE = """\
LIMIT = 3


def capped(number):
    return min(number, LIMIT)


def shown(number):
    return number + 1


def emptied(number):
    while number > 0:
        number -= 1
    return number


class Price:
    @property
    def cents(self):
        return self._cents

    @cents.setter
    def cents(self, value):
        self._cents = value * 100


def nobody():
    return shown(1)


def doubled(number):
    return number * 2
"""
DECLARATIONS = """\
WIDTH = 8
"""
CONFTEST = """\
import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def migrated_postgres():
    shared = pathlib.Path(__file__).with_name(f"shared-{os.getpid()}")
    shared.write_text("on a server")
    yield shared
    shared.unlink()
"""
TESTS = """\
import pytest

from planted.names import WIDTH
from planted.sums import Price, capped, doubled, emptied, shown


def test_width():
    assert WIDTH == 8


def test_capped():
    assert capped(7) == 3


def test_shown():
    shown(2)


def test_emptied():
    assert emptied(4) == 0


@pytest.mark.parametrize("value", [2])
def test_price(value):
    price = Price()
    price.cents = value
    assert price.cents == 200


def test_doubled(migrated_postgres):
    assert migrated_postgres.exists(), "a fork that ended has taken it away"
    assert doubled(3) == 6


COUNT = []


def test_that_fails_in_company():
    COUNT.append(emptied(0))
    assert len(COUNT) == 1
"""


def _plant(tree: Path) -> None:
    shutil.copytree(
        ROOT / "benchmarks", tree / "benchmarks", ignore=shutil.ignore_patterns("results")
    )
    (tree / "planted").mkdir()
    (tree / "planted" / "__init__.py").write_text("")
    (tree / "planted" / "sums.py").write_text(SOURCE)
    (tree / "planted" / "names.py").write_text(DECLARATIONS)
    (tree / "tests").mkdir()
    (tree / "tests" / "conftest.py").write_text(CONFTEST)
    (tree / "tests" / "test_sums.py").write_text(TESTS)
    (tree / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = slow: none is\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants are judged in forks: needs os.fork")
@pytest.mark.proof
def test_planted_mutants_are_killed_survive_and_time_out(tmp_path: Path) -> None:
    _plant(tmp_path)
    survivors = tmp_path / "survivors.jsonl"
    named = ["--files", "planted/sums.py", "planted/names.py", "--tests", "tests"]
    command = [sys.executable, "-m", "benchmarks.mutation", *named]
    ran = subprocess.run(
        [*command, "--sample", "0", "--wait", "3", "--survivors", str(survivors)],
        cwd=tmp_path,
        env={**os.environ, "TOLLHOUSE_BENCH_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    figure = json.loads(ran.stdout)
    alive = [json.loads(line) for line in survivors.read_text().splitlines()]
    found = {(each["line"], each["before"], each["after"]): each["verdict"] for each in alive}
    assert found == {
        (9, "return number + 1", "return None"): "survived",
        (9, "+", "-"): "survived",
        (9, "1", "2"): "survived",
        (14, "1", "2"): "survived",
        (29, "return shown(1)", "return None"): "not executed",
        (29, "1", "2"): "not executed",
    }
    counts = figure["settings"]
    # Which of two tests meets the other loop without an end first depends on what they took.
    assert counts["timed_out"] in (1, 2), "a loop without an end is stopped"
    assert (
        counts["killed"] + counts["timed_out"] == counts["mutants"] - len(alive) == 20 - len(alive)
    )


def test_mutants_leave_texts_and_annotations_alone() -> None:
    source = (
        b'def f(a: int = 1) -> int:\n    """Says 1."""\n    log.info("at 1")\n    return a\n'
        b"@dataclass(frozen=True, slots=True)\nclass A:\n    pass\n"
        b"if TYPE_CHECKING:\n    B = 1\nassert C == 2\n"
    )
    assert [(m.before, m.after) for m in mutants_of("f.py", source)] == [
        ("1", "2"),
        ("return a", "return None"),
    ]


def test_every_mutant_that_is_listed_as_equivalent_exists() -> None:
    listed = judged_equivalent()
    made = set().union(*(listed_in(file, listed) for file in {change.file for change in listed}))
    assert [change for change in listed if change not in made] == []
    assert all(len(reason) > 20 for reason in listed.values())


def test_a_survivor_is_asked_again_of_new_and_changed_tests_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    for name in ("source.py", "test_a.py", "test_b.py"):
        (tmp_path / name).write_text("a = 1\nb = 2\n")
    one, two = mutants_of("source.py", b"a = 1\nb = 2\n")
    first = KeptVerdicts(tmp_path / "kept.jsonl", {"test_a.py::test"})
    first.keep(one, Verdict("survived", passed=("test_a.py::test", "test_b.py::test"), left=1))
    first.keep(two, Verdict("killed", "test_a.py::test"))
    (tmp_path / "test_b.py").write_text("changed")
    second = KeptVerdicts(tmp_path / "kept.jsonl", {"test_a.py::test"})
    assert second.passed(one) == ("test_a.py::test",) and second.passed(two) == ()
    assert [second.is_killed(one), second.is_killed(two)] == [False, True]
    assert not KeptVerdicts(tmp_path / "kept.jsonl", set()).is_killed(two), "its test is gone"


def test_the_interval_is_wilsons() -> None:
    low, high = interval(85, 100)
    assert (round(low, 2), round(high, 2)) == (76.72, 90.69)


def test_a_mutant_is_put_into_functions_that_the_collector_leaves_alone() -> None:
    """The tests freeze what was imported: it is not among the collector's objects any more."""
    path, plain = "billing/differences.py", differences.lost.__code__
    source = (ROOT / path).read_bytes()
    statement = 'return _named(check, "lost", message, request_ids)'
    mutant = next(each for each in mutants_of(path, source) if each.before == statement)
    changed = compile(mutant.apply(source), plain.co_filename, "exec")
    gc.freeze()
    try:
        assert replace._replace(plain, *replace._codes(changed, "lost"))
        assert differences.lost("a/b", "gone", ["req_1"]) is None
    finally:
        gc.unfreeze()
        differences.lost.__code__ = plain
