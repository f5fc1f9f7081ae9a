"""Restores to drawn points of drawn months, with Stripe's fake going on: nobody pays twice, no number is
given twice. With `--fault` the provider's invoices are not read, and drills must fail."""

import argparse
import logging
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.report import figure, progress
from tests.billing.recovery.restore_drill import play, without_invoices


def main(words: Sequence[str] | None = None) -> int:
    """Exit 1 if a drill fails, or with `--fault` if none does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--fault", action="store_true")
    chosen = parser.parse_args(words)
    logging.getLogger("tollhouse").setLevel(logging.CRITICAL + 1)
    failed: dict[int, str] = {}
    named = Counter[str]()
    for seed in range(chosen.seed, chosen.seed + chosen.points):
        fault = without_invoices() if chosen.fault else nullcontext()
        with tempfile.TemporaryDirectory() as folder, fault:
            try:
                named.update(f"{check}: {kind}" for check, kind in play(Path(folder), seed))
            except AssertionError as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                failed[seed] = f"{where.name}: {where.line} {error}"[:200]
        progress(f"seed {seed}: {failed.get(seed, 'holds')}")
    told = {
        "points": chosen.points,
        "first": chosen.seed,
        "failing": failed,
        "named_by_the_audit": named,
        "fault": "the provider's invoices are not read" if chosen.fault else "",
    }
    bound = None if chosen.fault else 0
    figure("restores", len(failed), "drills", False, at_least=bound, aim=bound, settings=told)
    return int(bool(failed) != chosen.fault)


if __name__ == "__main__":
    sys.exit(main())
