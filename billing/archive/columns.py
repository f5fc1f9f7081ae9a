"""The columns of stored rows, from the tables that they come from, and their ClickHouse types.

An event and its charge are one row: a day is moved when its usage is rated, so both are there at once.
"""

from typing import Any

from sqlalchemy import Boolean, Column, Integer, String, Table

from billing.usage.tables import Charge, UsageEventRow
from core.database import Units, UtcDateTime

ROWS = "tollhouse_usage"
HOURS = "tollhouse_hours"
EVENTS: Table = UsageEventRow.__table__  # type: ignore[assignment]
CHARGES: Table = Charge.__table__  # type: ignore[assignment]
EVENT_COLUMNS = tuple(each.name for each in EVENTS.columns)
CHARGE_COLUMNS = tuple(each.name for each in CHARGES.columns if each.name != "request_id")
COLUMNS = (*EVENT_COLUMNS, *(f"charge_{name}" for name in CHARGE_COLUMNS))


def definitions() -> list[str]:
    """Columns of the ClickHouse table. An event that is not billed has no charge."""
    events = [f"{name} {_type(EVENTS.columns[name])}" for name in EVENT_COLUMNS]
    charges = [
        f"charge_{name} Nullable({kind_of(CHARGES.columns[name].type)})" for name in CHARGE_COLUMNS
    ]
    return events + charges


def _type(column: "Column[Any]") -> str:
    kind = kind_of(column.type)
    return f"Nullable({kind})" if column.nullable else kind


def kind_of(kind: Any) -> str:
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
