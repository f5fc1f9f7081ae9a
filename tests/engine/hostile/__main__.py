"""Tries hostile and odd model files by the thousand:

    python -m tests.engine.hostile --cases 2000 --seed 1 [--only configs] [--results FILE]

Each case is a small model, or an adapter, of which one file was changed, by a seed. It loads and answers,
or it is refused by one clear error that names the file and the field. Anything else (another exception, a
process that ends, 20 s of processor time, 600 MiB) is printed, and the command ends with 1.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.engine.hostile.runs import CLASSES, Failure, Run, made_bases


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.engine.hostile", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="of each class")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(CLASSES), action="append")
    parser.add_argument("--number", type=int, help="this case alone")
    parser.add_argument(
        "--bases", type=Path, help="a folder for the small models, written if absent"
    )
    parser.add_argument("--results", type=Path, help="a file of JSON lines to add the counts to")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        bases = options.bases or Path(folder) / "bases"
        bases = bases if bases.exists() else made_bases(bases)
        run = Run(bases, Path(folder), options.seed)
        for name in options.only or CLASSES:
            chosen = range(options.cases) if options.number is None else [options.number]
            counts, failures = run.of_class(name, chosen, shown=_print)
            failed = failed or bool(failures)
            line = {
                "proof": "hostile_files",
                "class": name,
                "seed": options.seed,
                "cases": options.cases,
            }
            line |= {"ends": dict(sorted(counts.items()))}
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(line | _slowest(failures)) + "\n")
    return int(failed)


def _print(failure: Failure) -> None:
    sys.stdout.write(
        f"{failure.outcome.kind}: {failure.number} {failure.work} {failure.case}: "
        f"{failure.outcome.message[:400]!r} ({failure.outcome.seconds} s, {failure.outcome.mib} MiB)\n"
    )
    sys.stdout.flush()


def _slowest(failures: list[Failure]) -> dict[str, object]:
    found = Counter(each.outcome.kind for each in failures)
    return {"failures": dict(found)}


if __name__ == "__main__":
    sys.exit(main())
