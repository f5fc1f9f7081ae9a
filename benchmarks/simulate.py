"""Seeds of the simulation, many of them: `python -m benchmarks.simulate --seeds 10000`. A failing
seed is printed and replays exactly with `--first SEED --seeds 1`.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.report import figure
from benchmarks.simulation.world import Broken, Stage, World
from core.database import Database

PART = 20  # seeds that a process plays before it reports


def migrated(folder: Path) -> Path:
    from migrations.run import upgrade

    path = folder / "template.db"
    database = Database(f"sqlite:///{path}")
    upgrade(database)
    database.close()
    return path


def run_seeds(seeds: range, template: Path, steps: int) -> list[tuple[dict[str, int], str]]:
    """For each seed the faults that struck, and what is broken, if anything."""
    fast = Path("/dev/shm")
    found: list[tuple[dict[str, int], str]] = []
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as folder:
        stage = Stage(Path(folder), template)
        for seed in seeds:
            try:
                found.append((World(seed, stage, steps).run(), ""))
            except Broken as error:
                found.append(({}, str(error)))
        stage.database.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    wanted = parser.parse_args()
    began, faults, broken = time.monotonic(), Counter[str](), []
    last = wanted.first + wanted.seeds
    parts = [range(at, min(at + PART, last)) for at in range(wanted.first, last, PART)]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(wanted.processes) as pool,
        Progress(console=Console(stderr=True)) as bar,
    ):
        template = migrated(Path(folder))
        shown = bar.add_task("seeds", total=wanted.seeds)
        work = pool.map(run_seeds, parts, [template] * len(parts), [wanted.steps] * len(parts))
        for seen, problem in (one for part in work for one in part):
            faults.update(seen)
            bar.advance(shown)
            if problem:
                broken.append(problem)
                sys.stderr.write(problem + "\n")
    figure(
        "simulate",
        len(broken),
        "failing seeds",
        False,
        at_least=0,
        aim=0,
        settings={
            "seeds": wanted.seeds,
            "first": wanted.first,
            "steps": wanted.steps,
            "seconds": round(time.monotonic() - began, 1),
            "faults": dict(sorted(faults.items())),
        },
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
