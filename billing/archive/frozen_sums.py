"""Frozen groups of closed days: charges by period, ledger entries by account, credit uses by grant.

An audit of the open days adds them to the rows that came since, so that it reads no row of a closed
day. Entries and uses are numbered when they are written and visible when they are committed, so a
closing freezes those that an earlier closing has seen.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select
from sqlalchemy.orm import Session

from billing.archive.tables import ClosedCharges, ClosedUnits
from billing.columns import (
    AMOUNT_COLUMNS,
    PART_AMOUNTS,
    PART_QUANTITIES,
    QUANTITY_COLUMNS,
)
from billing.ledger.tables import CreditUse, LedgerEntry
from billing.usage.tables import Charge, ClosedDay, UsageEventRow

ACCOUNT, GRANT = "account", "grant"
ChargeRows = list[tuple[Any, ...]]  # by `KEY`, with the sums of quantities and amounts
_AT_ONCE = 5_000  # values in one IN list, rows in one insert
_COMMITTED = timedelta(hours=1)  # no transaction runs longer
_SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
KEY = ("tenant_id", "usage_period_id", "bill_period_id", "price_version", "tokens")
# Places of columns that days closed by older versions lack; the latest columns first.
_LATER = tuple(
    frozenset(len(KEY) + _SUMS.index(name) for name in names)
    for names in (
        (*PART_QUANTITIES, *PART_AMOUNTS),
        (
            *("audio_seconds", "images", "characters"),
            *("audio_amount", "image_amount", "character_amount"),
        ),
    )
)
E, C, F = UsageEventRow, Charge, ClosedCharges
# Name, kind of unit, table and column of the key.
_TABLES: tuple[tuple[str, str, Any, Any], ...] = (
    ("entry", ACCOUNT, LedgerEntry, LedgerEntry.account_id),
    ("use", GRANT, CreditUse, CreditUse.grant_id),
)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one day: charges by `KEY` with `_SUMS`, and (kind, key, units)."""

    charges: ChargeRows
    units: list[tuple[str, str, int]]

    def digest(self) -> str:
        """Digest of the rows in the order of their keys."""
        digest = hashlib.sha256()
        charges = [_digested(row) for row in self.charges]
        for row in sorted((*charges, *self.units), key=lambda row: [str(v) for v in row]):
            digest.update(repr([str(value) for value in row]).encode())
        return digest.hexdigest()


def freeze(
    session: Session,
    day: datetime,
    charges: ChargeRows,
    before: ClosedDay | None,
    now: datetime,
) -> dict[str, Any]:
    """Write the groups of a day. Returns `ClosedDay.frozen`."""
    known: dict[str, int] = before.frozen if before is not None else {}
    committed = before is not None and before.closed_at <= now - _COMMITTED
    frozen: dict[str, Any] = {}
    for name, _, table, _ in _TABLES:
        after = int(known.get(f"last_{name}", 0))
        until = int(known[f"seen_{name}"]) if committed else after
        seen = session.scalar(select(func.max(table.id)))
        frozen[f"last_{name}"], frozen[f"seen_{name}"] = until, max(until, int(seen or 0))
    groups = Groups(charges, read_units(session, known, frozen))
    names = ("day", *KEY, *_SUMS)
    _insert(session, F, [dict(zip(names, (day, *row), strict=True)) for row in groups.charges])
    units = [
        {"day": day, "kind": kind, "key": key, "units": units} for kind, key, units in groups.units
    ]
    _insert(session, ClosedUnits, units)
    return frozen | {"groups": groups.digest()}


def read_groups(
    session: Session, batches: tuple[int, int], before: dict[str, Any], frozen: dict[str, Any]
) -> Groups:
    """Group the rows of a day. `before` is what the day before has frozen, `frozen` what it has."""
    return Groups(read_charges(session, batches), read_units(session, before, frozen))


def read_charges(session: Session, batches: tuple[int, int]) -> list[tuple[Any, ...]]:
    key = [C.tenant_id, C.usage_period_id, C.bill_period_id, C.price_version, generated(C)]
    rows = session.execute(
        select(*key, *(func.sum(getattr(C, name)) for name in _SUMS))
        .join(E, E.request_id == C.request_id)
        .where(E.batch_id > batches[0], E.batch_id <= batches[1])
        .group_by(*key)
    )
    return [charge_row(row) for row in rows]


def read_units(
    session: Session, before: dict[str, Any], frozen: dict[str, Any]
) -> list[tuple[str, str, int]]:
    units: list[tuple[str, str, int]] = []
    for name, kind, table, column in _TABLES:
        after, until = int(before.get(f"last_{name}", 0)), int(frozen[f"last_{name}"])
        inside = (table.id > after, table.id <= until)
        found = session.execute(
            select(column, func.sum(table.units)).where(*inside).group_by(column)
        )
        units += [(kind, str(row[0]), int(row[1])) for row in found]
    return units


def stored_groups(session: Session, day: datetime) -> Groups:
    key, sums = [getattr(F, name) for name in KEY], [getattr(F, name) for name in _SUMS]
    charges = session.execute(select(*key, *sums).where(F.day == day))
    columns = (ClosedUnits.kind, ClosedUnits.key, ClosedUnits.units)
    units = session.execute(select(*columns).where(ClosedUnits.day == day))
    return Groups(
        [charge_row(row) for row in charges], [(row[0], row[1], int(row[2])) for row in units]
    )


def charge_row(row: Any) -> tuple[Any, ...]:
    key, sums = row[: len(KEY)], row[len(KEY) :]
    return (*key[:-1], bool(key[-1]), *map(int, sums))


def _digested(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """As the oldest version that knew all of its columns above zero would have had it."""
    left_out: frozenset[int] = frozenset()
    for places in _LATER:
        if any(row[place] for place in places):
            break
        left_out |= places
    return tuple(value for place, value in enumerate(row) if place not in left_out)


def generated(table: Any) -> ColumnElement[bool]:
    """Whether a charge is of a generation or embedding, whose requests and tokens are priced."""
    return table.gpu_seconds + table.moderation_calls == 0  # type: ignore[no-any-return]


def closed_charges(
    session: Session, columns: list[Any], sums: list[Any], where: tuple[Any, Iterable[str]]
) -> Iterator[Any]:
    """Grouped frozen charges whose column has one of these values."""
    column, values = where
    for some in chunks(values):
        yield from session.execute(
            select(*columns, *sums).where(column.in_(some)).group_by(*columns)
        )


def closed_units(session: Session, kind: str, keys: Iterable[str]) -> dict[str, int]:
    """Frozen units by key."""
    found: dict[str, int] = {}
    for some in chunks(keys):
        rows = session.execute(
            select(ClosedUnits.key, func.sum(ClosedUnits.units))
            .where(ClosedUnits.kind == kind, ClosedUnits.key.in_(some))
            .group_by(ClosedUnits.key)
        )
        found |= {row[0]: int(row[1]) for row in rows}
    return found


def chunks(values: Iterable[str]) -> Iterator[list[str]]:
    """The values, as many at once as a statement may have."""
    ordered = sorted(set(values))
    for first in range(0, len(ordered), _AT_ONCE):
        yield ordered[first : first + _AT_ONCE]


def _insert(session: Session, table: Any, rows: list[dict[str, Any]]) -> None:
    for first in range(0, len(rows), _AT_ONCE):
        session.execute(insert(table), rows[first : first + _AT_ONCE])
