"""The disk of a spool: when it takes no more requests, and what is given back to it."""

import os
import sqlite3

from core.errors import Unavailable

# Bytes that are left to the records of admitted requests, and to folding and shrinking: a spool that
# has filled its disk to the last byte, while the database was away, could never empty itself.
RESERVE = 64 * 2**20


def has_room(folder: str, reserve: int) -> bool:
    found = os.statvfs(folder)
    return not found.f_blocks or found.f_bavail * found.f_frsize >= reserve


def no_room() -> Unavailable:
    return Unavailable(
        "The gateway cannot record usage on its disk, so it accepts no new requests.",
        next_step="Free disk space in TOLLHOUSE_DATA_DIR; pending records are then written.",
        code="spool_unavailable",
        retry_after_s=5.0,
    )


def shrink(connection: sqlite3.Connection, most: int) -> None:
    """Where more than `most` bytes of the file, and most of it, are free, give them back."""
    pages, free, size = (
        int(connection.execute(f"pragma {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    if free * size > most and free > pages // 2:
        connection.execute("vacuum")
        connection.execute("pragma wal_checkpoint(truncate)")
