"""Counts records in the spool files on this machine, without taking their locks."""

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from core.settings import Settings
from gateway.metering.spool import OPENED, request_id_of
from gateway.metering.streams.watch import wait_for_stream


@dataclass(frozen=True, slots=True)
class SpoolCounts:
    running: int = 0  # open requests
    unshipped: int = 0  # ended requests that are not in the database yet
    parked: int = 0  # refused permanently by the database
    oldest: float | None = None  # oldest change of a file with unshipped records, Unix seconds


def spool_counts(settings: Settings) -> SpoolCounts:
    running = unshipped = parked = 0
    changed: list[float] = []
    for path in sorted((settings.data_dir / "spool").glob("*.db")):
        try:
            counted = _counts(path)
            if counted[1]:
                changed.append(path.stat().st_mtime)
        except (sqlite3.Error, FileNotFoundError):
            continue  # its owner has just removed it
        running, unshipped, parked = (
            running + counted[0],
            unshipped + counted[1],
            parked + counted[2],
        )
    return SpoolCounts(running, unshipped, parked, min(changed, default=None))


def wait_until_shipped(settings: Settings, timeout_s: float = 5.0) -> SpoolCounts:
    """Wait briefly for the shippers and the stream, so that a command sees requests that just ended."""
    deadline = time.monotonic() + timeout_s
    while (counts := spool_counts(settings)).unshipped and time.monotonic() < deadline:
        time.sleep(0.05)
    wait_for_stream(settings, max(0.0, deadline - time.monotonic()))
    return counts


def requests_in_spools(settings: Settings) -> frozenset[str]:
    """Requests that run, or whose usage is not in the database yet, on this machine."""
    found: set[str] = set()
    for path in sorted((settings.data_dir / "spool").glob("*.db")):
        try:
            with closing(
                sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2)
            ) as connection:
                for topic, body in connection.execute(
                    "select ?, body from opened union all select topic, body from outbox"
                    " union all select topic, body from parked",
                    (OPENED,),
                ):
                    found.add(request_id_of(topic, body))
        except (sqlite3.Error, FileNotFoundError):
            continue  # its owner has just removed it
    return frozenset(found)


def _counts(path: Path) -> tuple[int, int, int]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2)) as connection:
        row = connection.execute(
            "select (select count(*) from opened), (select count(*) from outbox),"
            " (select count(*) from parked)"
        ).fetchone()
        return int(row[0]), int(row[1]), int(row[2])
