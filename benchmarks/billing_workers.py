"""Rating with one and with two processes that lease shards, in turns on the same database.

python -m benchmarks.billing_workers URL NOW    is one such process: it rates at each line that it reads
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from billing.rating.rating_worker import rate_all
from core.clock import FakeClock
from core.database import Database

WORKERS = 2


class RatingWorker:
    def __init__(self, url: str, now: datetime) -> None:
        command = [sys.executable, "-m", "benchmarks.billing_workers", url, now.isoformat()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("rate\n")
        self._process.stdin.flush()

    def finish(self) -> int:
        """The events that it has rated."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a rating worker ended with status {self._process.wait()}")
        return int(line)

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


@contextmanager
def rating_workers(url: str, now: datetime) -> Iterator[list[RatingWorker]]:
    """Processes that have rated nothing yet, but have imported all."""
    workers = [RatingWorker(url, now) for _ in range(WORKERS)]
    try:
        for worker in workers:
            worker.begin()
        if sum(worker.finish() for worker in workers):
            raise SystemExit("there was usage to rate before the first turn")
        yield workers
    finally:
        for worker in workers:
            worker.end()


def alone_and_together(
    workers: list[RatingWorker], ingest: Callable[[], int], turns: int
) -> tuple[float, float, list[float]]:
    """Events a second of one worker and of all (medians), and the ratio in each turn. `ingest` stores
    usage to rate; returns how many events."""
    speeds: tuple[list[float], list[float]] = [], []
    for turn in range(turns + 1):
        for number, chosen in enumerate((workers[:1], workers)):
            speed = _speed(chosen, ingest())
            if turn > 0:  # the first one warms all
                speeds[number].append(speed)
    alone, together = speeds
    ratios = [two / one for one, two in zip(alone, together, strict=True)]
    return statistics.median(alone), statistics.median(together), ratios


def _speed(workers: list[RatingWorker], events: int) -> float:
    began = time.perf_counter()
    for worker in workers:
        worker.begin()
    rated = sum(worker.finish() for worker in workers)
    spent = time.perf_counter() - began
    if rated != events:
        raise SystemExit(f"{rated} of {events} events were rated")
    return events / spent


def main() -> int:
    url, now = sys.argv[1:]
    database, clock = Database(url), FakeClock(datetime.fromisoformat(now))
    for _ in sys.stdin:
        sys.stdout.write(f"{rate_all(database, clock)}\n")
        sys.stdout.flush()
    database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
