"""The columns of archived rows, from the tables that they come from, and their ClickHouse types."""

from typing import Any

from sqlalchemy import Boolean, Column, Integer, String, Table

from billing.models import Charge, UsageEventRow
from core.database import Units, UtcDateTime

# An end user can ask for erasure, which is slow in immutable rows, so the archive names none.
LEFT_OUT = frozenset({"end_user"})

EVENTS: Table = UsageEventRow.__table__  # type: ignore[assignment]
CHARGES: Table = Charge.__table__  # type: ignore[assignment]
EVENT_COLUMNS = tuple(each.name for each in EVENTS.columns if each.name not in LEFT_OUT)
# A charge is looked for by the time of its event.
CHARGE_COLUMNS = (*(each.name for each in CHARGES.columns), "occurred_at")


def definitions(table: Table, names: tuple[str, ...]) -> list[str]:
    """Columns of the ClickHouse table."""
    source = {each.name: each for each in (*EVENTS.columns, *table.columns)}
    return [f"{name} {_type(source[name])}" for name in names]


def _type(column: "Column[Any]") -> str:
    kind = _kind(column.type)
    return f"Nullable({kind})" if column.nullable else kind


def _kind(kind: Any) -> str:
    if isinstance(kind, Units):
        return "Decimal(38, 0)"
    if isinstance(kind, UtcDateTime):
        return "DateTime64(6, 'UTC')"
    if isinstance(kind, Boolean):
        return "Bool"
    if isinstance(kind, Integer):
        return "Int64"
    plain = getattr(kind, "impl", kind)
    if isinstance(plain, String):
        return "String"
    raise TypeError(f"no ClickHouse type for {kind!r}")
