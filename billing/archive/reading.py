"""Reads from the archive what retention has dropped from the database: rows below the retention floor.

The database holds the rows above it, so that no row is read from both.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from billing.archive.base import Grouping, RawArchive, Wanted
from billing.models import UsageRetention
from billing.partitions import latest_retention
from core.errors import BadRequest


def archive_of(session: Session) -> RawArchive | None:
    found: RawArchive | None = session.info.get(RawArchive)
    return found


def archived_usage(
    session: Session, wanted: Wanted, columns: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    source = _source(session, wanted.start)
    if source is not None:
        archive, retention = source
        yield from archive.usage(_below(wanted, retention), columns)


def archived_charges(
    session: Session, wanted: Wanted, columns: Sequence[tuple[str, str]]
) -> Iterator[tuple[Any, ...]]:
    source = _source(session, wanted.start)
    if source is not None:
        archive, retention = source
        yield from archive.charges(_below(wanted, retention), columns)


def archived_buckets(
    session: Session, wanted: Wanted, grouping: Grouping
) -> Iterator[dict[str, Any]]:
    """BadRequest for what is not archived."""
    source = _source(session, wanted.start)
    if source is None:
        return
    archive, retention = source
    if "end_user" in grouping.by:
        raise BadRequest(
            f"End users are not archived, and the period begins before {retention.kept_from:%Y-%m-%d}.",
            next_step=f"Begin at {retention.kept_from:%Y-%m-%d} or later, or group otherwise.",
            param="group_by",
        )
    yield from archive.buckets(_below(wanted, retention), grouping)


def _source(session: Session, start: datetime) -> tuple[RawArchive, UsageRetention] | None:
    archive = archive_of(session)
    retention = latest_retention(session) if archive is not None else None
    if archive is None or retention is None or start >= retention.kept_from:
        return None
    return archive, retention


def _below(wanted: Wanted, retention: UsageRetention) -> Wanted:
    return Wanted(wanted.start, wanted.end, wanted.tenant_id, wanted.project_id, retention.floor_id)
