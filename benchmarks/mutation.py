"""How many small faults in money, limits and streaming the tests find.

    python -m benchmarks.mutation --set admission --sample 150 --seed 1 --survivors survivors.jsonl
    python -m benchmarks.mutation --files billing/rating/tiers.py --tests tests/billing/rating

Each mutant is one changed operator, constant, condition or statement, drawn uniformly from all of
the package. It is killed when a test that executes its line fails or takes five times as long.
Survivors are listed for a person to judge: an equivalent mutant changes nothing that can be observed,
and goes into `mutants/equivalent.toml` with the reason; any other is a missing test. `--minutes` bounds
a call; the next one goes on where it ended, and asks of survivors the tests that they have not met: so
in the end all that execute the line. Tests marked `slow` and processes that tests start do not see
the mutant.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.home import home
from benchmarks.mutants.coverage_map import CoverageMap, MeasuredTests
from benchmarks.mutants.equivalent import change_of, judged_equivalent, without_equivalents
from benchmarks.mutants.judge import (
    KILLED,
    NOT_EXECUTED,
    SURVIVED,
    TIMED_OUT,
    Judge,
    Verdict,
    WarmProcess,
)
from benchmarks.mutants.kept import KeptVerdicts
from benchmarks.mutants.mutate import Mutant, mutants_of
from benchmarks.report import figure, progress

ROOT = Path(__file__).parents[1]
PACKAGES = ("billing", "gateway/admission", "gateway/metering", "gateway/answers")
_OF_THE_GATEWAY = ("tests/gateway", "tests/contracts", "tests/journeys")
_OF_BILLING = (
    "tests/billing",
    "tests/journeys",
    "tests/contracts",
    "tests/dashboards",
    "tests/gateway/admin",
    "tests/gateway/serving",
    "tests/migrations",
)


@dataclass(frozen=True)
class Part:
    """A part of the product, the tests that may see a fault in it, and those that see most."""

    files: Sequence[str]
    tests: Sequence[str]
    own: Sequence[str] = ()


PARTS = {
    "billing": Part(["billing"], _OF_BILLING, ["tests/billing"]),
    "metering": Part(["gateway/metering"], _OF_THE_GATEWAY, ["tests/gateway/metering"]),
    "admission": Part(
        ["gateway/admission"], _OF_THE_GATEWAY, ["tests/gateway/admission", "tests/contracts"]
    ),
    "streaming": Part(["gateway/answers"], _OF_THE_GATEWAY, ["tests/gateway/answers"]),
}


def main() -> int:
    options = _options()
    part = Part(options.files, options.tests)
    if options.set:
        part = replace(PARTS[options.set], tests=options.tests or PARTS[options.set].tests)
    if not part.files or not part.tests:
        raise SystemExit("--files: name the tests that judge them, with --tests.")
    ends = time.monotonic() + 60 * options.minutes
    tests = _test_files(part)
    packages = PACKAGES if options.set else tuple(sorted({f.partition("/")[0] for f in part.files}))
    name = "mutation.json" if options.set else f"mutation-{'-'.join(packages)}.json"
    measured = MeasuredTests(home() / name, packages)
    if not measured.measure(tests, options.minutes):
        progress("Time is up; run the same command again to go on.")
        return 0
    mutants, left_out = without_equivalents(
        drawn(_sources(part), options.sample, options.seed), judged_equivalent()
    )
    verdicts = _judge_all(options, part, measured, mutants, ends)
    if verdicts is None:
        progress("Time is up; run the same command again to go on.")
        return 0
    _report(options, mutants, verdicts, left_out)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.mutation")
    parser.add_argument("--set", choices=sorted(PARTS), help="a named part of the product")
    parser.add_argument("--files", nargs="*", default=[], help="source files or folders instead")
    parser.add_argument(
        "--tests", nargs="*", default=[], help="the tests that judge; fewer than a set's"
    )
    parser.add_argument("--sample", type=int, default=150, help="mutants to draw; 0 is all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40, help="of tests that one mutant gets")
    parser.add_argument("--wait", type=float, default=15, help="seconds that any test may take")
    parser.add_argument("--minutes", type=float, default=600, help="after which this call ends")
    parser.add_argument("--control", type=int, default=5, help="runs of chosen tests, unchanged")
    parser.add_argument("--survivors", type=Path, help="where to write them as JSON lines")
    options = parser.parse_args()
    if not options.set and not options.files:
        options.set = "admission"
    return options


def _test_files(part: Part) -> list[str]:
    found = [_files_below(name, "test_*.py") for name in part.tests]
    files = dict.fromkeys(name for names in found for name in names)
    return sorted(files, key=lambda each: not each.startswith(tuple(part.own)))


def _sources(part: Part) -> list[str]:
    files = [name for named in part.files for name in _files_below(named, "*.py")]
    return [f for f in files if not f.endswith("__init__.py") and "fake_" not in f]


def _files_below(name: str, pattern: str) -> list[str]:
    path = ROOT / name
    if path.is_file():
        return [name]
    return [str(each.relative_to(ROOT)) for each in sorted(path.rglob(pattern))]


def drawn(files: Sequence[str], sample: int, seed: int) -> list[Mutant]:
    found = [each for name in files for each in mutants_of(name, (ROOT / name).read_bytes())]
    if sample and len(found) > sample:
        found = sorted(
            random.Random(seed).sample(found, sample), key=lambda each: (each.path, each.start)
        )
    return found


def _judge_all(
    options: argparse.Namespace,
    part: Part,
    measured: MeasuredTests,
    mutants: list[Mutant],
    ends: float,
) -> list[Verdict] | None:
    """None where time ran out."""
    files = _test_files(part)
    lines = measured.map(files)
    kept = KeptVerdicts(home() / f"mutants-{options.set or 'files'}.jsonl", measured.tests)
    with tempfile.TemporaryDirectory(prefix="tollhouse-mutants-") as scratch:
        plan = Path(scratch) / "plan.json"
        plan.write_text(json.dumps(_plan(lines, _sources(part), measured.modules)))
        processes = [WarmProcess(mode, plan, options.wait) for mode in ("collected", "imported")]
        judge = Judge(lines, part.own, options.seconds, processes)
        try:
            _run_controls(judge, mutants, 0 if len(kept) else options.control)
            for number, mutant in enumerate(mutants):
                if kept.is_killed(mutant):
                    continue
                if time.monotonic() > ends:
                    return None
                verdict = judge.judge(mutant, kept.passed(mutant))
                kept.keep(mutant, verdict)
                progress(
                    f"{number + 1}/{len(mutants)} {verdict.result} in {verdict.seconds:.1f} s "
                    f"{mutant.path}:{mutant.line} {mutant.before[:40]!r} -> {mutant.after[:40]!r}"
                )
        finally:
            for process in processes:
                process.close()
    return [kept.verdict(mutant) or Verdict(NOT_EXECUTED) for mutant in mutants]


def _run_controls(judge: Judge, mutants: list[Mutant], count: int) -> None:
    for mutant in mutants[:: max(1, len(mutants) // max(1, count))][:count]:
        verdict = judge.control(mutant)
        if verdict.result == KILLED:
            progress(f"control: {verdict.test} fails beside its neighbours with nothing changed")


def _plan(lines: CoverageMap, sources: list[str], modules: list[str]) -> dict[str, Any]:
    tests = {test.name: test for path in sources for test in lines.tests_of_file(path)}.values()
    return {
        "files": sorted({test.file for test in tests}),
        "seconds": {test.name: test.seconds for test in tests},
        "modules": modules,
    }


def interval(killed: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share in percent (Wilson, 1927)."""
    if not of:
        return 0.0, 100.0
    share, z = killed / of, 1.959964
    middle = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return tuple(100 * (middle + sign * half) / (1 + z * z / of) for sign in (-1, 1))  # type: ignore[return-value]


def _report(
    options: argparse.Namespace, mutants: list[Mutant], verdicts: list[Verdict], left_out: int
) -> None:
    counts = {
        result: sum(verdict.result == result for verdict in verdicts)
        for result in (KILLED, TIMED_OUT, SURVIVED, NOT_EXECUTED)
    }
    survivors: list[dict[str, Any]] = [
        {
            "file": mutant.path,
            "line": mutant.line,
            "before": mutant.before,
            "after": mutant.after,
            "verdict": verdict.result,
            "tests": len(verdict.passed),
            "tests_left": verdict.left,
            "function": (change := change_of(mutant)).function,
            "text": change.line,
            "becomes": change.becomes,
        }
        for mutant, verdict in zip(mutants, verdicts, strict=True)
        if verdict.result in (SURVIVED, NOT_EXECUTED)
    ]
    if options.survivors is not None:
        options.survivors.write_text("".join(json.dumps(each) + "\n" for each in survivors))
    for each in survivors:
        progress(
            f"{each['verdict']}: {each['file']}:{each['line']}: {each['before'][:60]!r} -> "
            f"{each['after'][:60]!r}"
        )
    killed = counts[KILLED] + counts[TIMED_OUT]
    low, high = interval(killed, len(mutants))
    figure(
        f"mutants killed in {options.set or ' '.join(options.files)}",
        100 * killed / max(1, len(mutants)),
        "%",
        True,
        at_least=85,
        aim=93,
        settings={
            "mutants": len(mutants),
            **{result.replace(" ", "_"): count for result, count in counts.items()},
            "equivalent": left_out,
            "percent_with_equivalent": round(100 * killed / max(1, len(mutants) + left_out), 1),
            "met_by_all_tests": sum(not each["tests_left"] for each in survivors),
            "interval_95": [round(low, 1), round(high, 1)],
            "seconds_of_tests": options.seconds,
            "seed": options.seed,
            "at": time.strftime("%Y-%m-%d"),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
