"""Seeds of the simulation, many of them: `python -m benchmarks.simulate --seeds 10000`. A failing seed
is printed and replays exactly with `--first SEED --seeds 1`.

    python -m benchmarks.simulate --database postgresql://127.0.0.1/postgres --workers 2 --seeds 200

plays the same stories on a PostgreSQL server, in databases of its own. Processes rate the usage beside
each other and are killed and stopped. How far they are at a step is theirs, so a seed does not replay
exactly there.

With `--journal FILE` each part that was played is noted there, and a run that was ended goes on with
the parts that are missing: what the summary counts are the seeds of all its runs.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.report import figure, progress
from benchmarks.simulation.postgres import PostgresStage, migrated_database
from benchmarks.simulation.stage import SqliteStage, Stage
from benchmarks.simulation.world import Broken, World
from core.database import Database

TELL_EVERY = 250  # seeds, where no bar can be drawn
PART = 20  # seeds that a process plays before it reports


def migrated(folder: Path) -> Path:
    from migrations.run import upgrade

    path = folder / "template.db"
    database = Database(f"sqlite:///{path}")
    upgrade(database)
    database.close()
    return path


@dataclass(frozen=True)
class Place:
    """Where worlds are played."""

    template: str  # a migrated SQLite file, or a migrated database on the server
    server: str = ""  # URL of PostgreSQL
    workers: int = 1

    def stage(self, folder: Path) -> Stage:
        if self.server:
            return PostgresStage(folder, self.server, self.template, self.workers)
        return SqliteStage(folder, Path(self.template))

    @property
    def name(self) -> str:
        return f"postgresql, {self.workers} rating workers" if self.server else "sqlite"


def run_seeds(seeds: range, place: Place, steps: int) -> list[tuple[dict[str, int], str]]:
    """For each seed the faults that struck, and what is broken, if anything."""
    gc.freeze()  # the modules: looking them over again and again is a tenth of the time
    fast = Path("/dev/shm")
    found: list[tuple[dict[str, int], str]] = []
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as folder:
        stage = place.stage(Path(folder))
        try:
            for seed in seeds:
                try:
                    found.append((World(seed, stage, steps).run(), ""))
                except Broken as error:
                    found.append(({}, str(error)))
        finally:
            stage.close()
    return found


def play_part(seeds: range, place: Place, steps: int) -> dict[str, Any]:
    """A line of the journal."""
    began, cpu = time.monotonic(), time.process_time()
    faults, broken = Counter[str](), {}
    for seed, (seen, problem) in zip(seeds, run_seeds(seeds, place, steps), strict=True):
        faults.update(seen)
        if problem:
            broken[seed] = problem
    return {
        "first": seeds.start,
        "seeds": len(seeds),
        "steps": steps,
        "place": place.name,
        "faults": dict(faults),
        "broken": broken,
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


def played_before(journal: Path | None, steps: int, place: Place) -> list[dict[str, Any]]:
    if journal is None or not journal.exists():
        return []
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return [line for line in lines if (line["steps"], line["place"]) == (steps, place.name)]


def summary(parts: list[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """What came of all parts; `seconds` is the wall time of this run alone."""
    faults = Counter[str]()
    for part in parts:
        faults.update(part["faults"])
    seeds = sum(part["seeds"] for part in parts)
    cpu = sum(part["cpu_seconds"] for part in parts)
    return {
        "seeds": seeds,
        "first": min(part["first"] for part in parts),
        "steps": parts[0]["steps"],
        "place": parts[0]["place"],
        "failing_seeds": sorted(int(seed) for part in parts for seed in part["broken"]),
        "kinds_of_fault": len(faults),
        "faults": dict(sorted(faults.items())),
        "seconds": round(wall_s, 1),
        "cpu_seconds_a_seed": round(cpu / seeds, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--journal", type=Path, help="note each part here; skip what is noted")
    parser.add_argument("--database", default="", help="URL of a PostgreSQL server; else SQLite")
    parser.add_argument("--workers", type=int, default=2, help="rating processes on PostgreSQL")
    wanted = parser.parse_args()
    with ExitStack() as stack:
        if wanted.database:
            name = stack.enter_context(migrated_database(wanted.database))
            place = Place(name, wanted.database, wanted.workers)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            place = Place(str(migrated(Path(folder))))
        return play(wanted, place)


def play(wanted: argparse.Namespace, place: Place) -> int:
    last = wanted.first + wanted.seeds
    parts = [range(at, min(at + PART, last)) for at in range(wanted.first, last, PART)]
    asked = {(part.start, len(part)) for part in parts}
    before = played_before(wanted.journal, wanted.steps, place)
    made = [part for part in before if (part["first"], part["seeds"]) in asked]
    known = {(part["first"], part["seeds"]) for part in made}
    missing = [part for part in parts if (part.start, len(part)) not in known]
    began = time.monotonic()
    with (
        ProcessPoolExecutor(wanted.processes) as pool,
        Progress(console=Console(stderr=True)) as bar,
    ):
        done = sum(part["seeds"] for part in made)
        shown = bar.add_task("seeds", total=wanted.seeds, completed=done)
        for work in as_completed(
            [pool.submit(play_part, part, place, wanted.steps) for part in missing]
        ):
            part = work.result()
            made.append(part)
            done += part["seeds"]
            bar.advance(shown, part["seeds"])
            if wanted.journal is not None:
                with wanted.journal.open("a") as journal:
                    journal.write(json.dumps(part) + "\n")
            if not bar.console.is_terminal and done % TELL_EVERY < PART:
                progress(f"{done} of {wanted.seeds} seeds, {time.monotonic() - began:.0f} s")
            sys.stderr.writelines(problem + "\n" for problem in part["broken"].values())
    found = summary(made, time.monotonic() - began)
    bad = len(found["failing_seeds"])
    figure("simulate", bad, "failing seeds", False, at_least=0, aim=0, settings=found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
