"""How many small faults in money, limits and streaming the tests find.

    python -m benchmarks.mutation --set billing --sample 400 --seed 1
    python -m benchmarks.mutation --files billing/rating.py --tests tests/billing/test_rating.py

Each mutant is one changed operator, constant, condition or statement. It is killed when a test that
executes its line fails or exceeds the time-out. Survivors are listed for a person to judge: an
equivalent mutant changes nothing that can be observed; any other is a missing test.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks.mutants.coverage_map import tests_by_line
from benchmarks.mutants.mutate import Mutant, mutants_of
from benchmarks.report import figure, progress

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300
MOST_TESTS = 40  # a line that hundreds of tests execute is judged by the first of them
SETS: dict[str, tuple[list[str], list[str]]] = {
    "billing": (["billing"], ["tests/billing", "tests/journeys/test_billing_stories.py"]),
    "metering": (["gateway/metering"], ["tests/gateway/metering", "tests/gateway/test_chat.py"]),
    "admission": (
        ["gateway/admission"],
        ["tests/gateway/limits", "tests/contracts/test_counters.py"],
    ),
    "streaming": (["gateway/streaming"], ["tests/gateway/streaming", "tests/gateway/test_chat.py"]),
}


def main() -> int:
    options = _options()
    files, tests = _files_and_tests(options)
    with tempfile.TemporaryDirectory(prefix="tollhouse-mutants-") as scratch:
        trees = [_copy(Path(scratch) / f"tree{n}") for n in range(options.workers)]
        progress(f"running {len(tests)} test paths once under coverage")
        lines = tests_by_line(trees[0], files, tests, Path(scratch))
        mutants = _drawn(files, options.sample, options.seed)
        progress(f"judging {len(mutants)} mutants of {len(files)} files")
        verdicts = _judge_all(mutants, lines, trees)
    return _report(options, mutants, verdicts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.mutation")
    parser.add_argument("--set", choices=sorted(SETS), help="a named part of the product")
    parser.add_argument("--files", nargs="*", default=[], help="source files or folders instead")
    parser.add_argument("--tests", nargs="*", default=[], help="the tests that judge them")
    parser.add_argument("--sample", type=int, default=300, help="mutants to draw; 0 is all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--survivors", type=Path, help="where to write the survivors as JSON lines")
    return parser.parse_args()


def _files_and_tests(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    named, tests = (options.files, options.tests)
    if options.set:
        named, tests = SETS[options.set]
    if not named or not tests:
        raise SystemExit("Give --set, or --files together with --tests.")
    files: list[str] = []
    for name in named:
        path = ROOT / name
        files += [str(f.relative_to(ROOT)) for f in sorted(path.rglob("*.py"))] or [name]
    return [f for f in files if not f.endswith("__init__.py") and "fake_" not in f], tests


def _copy(target: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def _drawn(files: list[str], sample: int, seed: int) -> list[Mutant]:
    found = [each for name in files for each in mutants_of(name, (ROOT / name).read_bytes())]
    if sample and len(found) > sample:
        found = sorted(
            random.Random(seed).sample(found, sample), key=lambda each: (each.path, each.start)
        )
    return found


def _judge_all(
    mutants: list[Mutant], lines: dict[str, dict[int, list[str]]], trees: list[Path]
) -> list[str]:
    free: Queue[Path] = Queue()
    for tree in trees:
        free.put(tree)
    done = 0

    def judge(mutant: Mutant) -> str:
        nonlocal done
        tests = _tests_for(mutant, lines.get(mutant.path, {}))
        tree = free.get()
        try:
            verdict = _judge(mutant, tests, tree) if tests else "not covered"
        finally:
            free.put(tree)
        done += 1
        if done % 20 == 0:
            progress(f"{done} of {len(mutants)}")
        return verdict

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(judge, mutants))


def _tests_for(mutant: Mutant, lines: dict[int, list[str]]) -> list[str]:
    """Tests that execute the line; for one that runs at import alone, those that use the file."""
    if mutant.statement in lines and not lines[mutant.statement]:
        return sorted({test for tests in lines.values() for test in tests})
    return lines.get(mutant.statement, [])


def _judge(mutant: Mutant, tests: list[str], tree: Path) -> str:
    path = tree / mutant.path
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        return _run(tests[:MOST_TESTS], tree)
    finally:
        path.write_bytes(source)


def _run(tests: list[str], tree: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, "--no-header", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "timed out"
    return "survived" if status == 0 else "killed"


def _report(options: argparse.Namespace, mutants: list[Mutant], verdicts: list[str]) -> int:
    killed = sum(verdict in ("killed", "timed out") for verdict in verdicts)
    survivors: list[dict[str, Any]] = [
        {"file": m.path, "line": m.line, "before": m.before, "after": m.after, "verdict": verdict}
        for m, verdict in zip(mutants, verdicts, strict=True)
        if verdict in ("survived", "not covered")
    ]
    target = options.survivors
    if target is not None:
        target.write_text("".join(json.dumps(each) + "\n" for each in survivors))
    for each in survivors:
        progress(
            f"{each['verdict']}: {each['file']}:{each['line']}: {each['before'][:60]!r} -> "
            f"{each['after'][:60]!r}"
        )
    figure(
        f"mutants killed in {options.set or ' '.join(options.files)}",
        100 * killed / max(1, len(mutants)),
        "%",
        True,
        at_least=85,
        aim=93,
        settings={
            "mutants": len(mutants),
            "timed_out": verdicts.count("timed out"),
            "not_covered": verdicts.count("not covered"),
            "seed": options.seed,
            "at": time.strftime("%Y-%m-%d"),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
