"""Reads raw events and charges through one port: those of moved days from their store, the others from
the database. No row is read from both.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from billing.usage.border import Border, archive_of, border_of, not_moved, readable
from billing.usage.raw_rows import Grouping, RawArchive, Reading, Wanted
from billing.usage.sql_rows import SqlRows
from billing.usage.tables import Charge, UsageEventRow
from core.errors import DependencyDown

T = TypeVar("T")


def read_rows(
    session: Session, wanted: Wanted, reading: Reading, lacks: list[str] | None = None
) -> Iterator[tuple[Any, ...]]:
    """The rows of both in order. DependencyDown if the store does not answer or is not set; with
    `lacks` the rows of the database alone then, and the reason in it."""
    border = border_of(session)
    database = SqlRows(session, not_moved(border))
    width = len(reading.columns)
    # The values of the order come first, so that the rows of both can be compared.
    both = replace(reading, columns=(*reading.order, *reading.columns))
    ours = database.rows(wanted, both)
    if border is None or not _reaches(wanted, border):
        yield from (row[-width:] for row in ours)
        return
    theirs = _checked(partial(_rows_of_store, session, wanted, border, both), lacks)
    key = len(reading.order)
    merged = heapq.merge(theirs, ours, key=lambda row: row[:key], reverse=reading.falling)
    yield from (row[-width:] for row in islice(merged, reading.limit))


def read_buckets(
    session: Session, wanted: Wanted, grouping: Grouping, lacks: list[str] | None = None
) -> tuple[Border | None, list[dict[str, Any]]]:
    """The store's sums, and the border up to which they are."""
    border = border_of(session)
    if border is None or not _reaches(wanted, border):
        return border, []
    theirs = partial(_buckets_of_store, session, wanted, border, grouping)
    return border, list(_checked(theirs, lacks))


def charged_sums(
    session: Session,
    key: Sequence[Any],
    sums: Sequence[Any],
    conditions: Sequence[ColumnElement[bool]],
) -> list[tuple[Any, ...]]:
    """Sums of charges by key, in the order of the keys. DependencyDown if days were moved to a store
    that does not answer: a part of the sums would be wrong."""
    border = border_of(session)
    here = (
        select(*key, *(func.sum(each) for each in sums))
        .select_from(UsageEventRow)
        .join(Charge, Charge.request_id == UsageEventRow.request_id)
        .where(*conditions, *not_moved(border))
        .group_by(*key)
    )
    rows = [tuple(row) for row in session.execute(here)]
    if border is not None:
        store = _store_of(session, border)
        rows += store.charged(border.last_day, key, sums, conditions)
    found: dict[tuple[Any, ...], list[int]] = {}
    width = len(key)
    for row in rows:
        values = found.setdefault(row[:width], [0] * len(sums))
        for place, value in enumerate(row[width:]):
            values[place] += int(value or 0)
    return [(*where, *values) for where, values in sorted(found.items())]


def known_elsewhere(session: Session, request_ids: Sequence[str]) -> set[str]:
    """Which of these requests the store has. DependencyDown if it does not answer or is not set."""
    border = border_of(session)
    if border is None or not request_ids:
        return set()
    return _store_of(session, border).known(request_ids, border.last_day)


def _store_of(session: Session, border: Border) -> RawArchive:
    archive = archive_of(session)
    if archive is None:
        raise DependencyDown(
            "Days were moved to ClickHouse, and TOLLHOUSE_EVENTS_URL is not set.",
            next_step="Set it to the database that has them.",
        )
    return readable(archive, border)


def _reaches(wanted: Wanted, border: Border) -> bool:
    return wanted.start < border.until


def _rows_of_store(
    session: Session, wanted: Wanted, border: Border, reading: Reading
) -> Iterator[tuple[Any, ...]]:
    moved = replace(wanted, last_day=border.last_day)
    yield from _store_of(session, border).rows(moved, reading)


def _buckets_of_store(
    session: Session, wanted: Wanted, border: Border, grouping: Grouping
) -> Iterator[dict[str, Any]]:
    moved = replace(wanted, last_day=border.last_day)
    yield from _store_of(session, border).buckets(moved, grouping)


def _checked(read: Callable[[], Iterator[T]], lacks: list[str] | None) -> Iterator[T]:
    """With `lacks`, a store that fails before its first row gives none."""
    rows = read()
    if lacks is None:
        yield from rows
        return
    try:
        found = list(rows)  # a page's rows are few
    except DependencyDown as error:
        lacks.append(error.message)
        return
    yield from found
