"""Expressions of `UsageEventRow` and `Charge` as ClickHouse's SQL on the one table that holds both.

Values are written into the text, quoted by ClickHouse's rules, in which a backslash escapes.
"""

from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.sql import coercions, roles
from sqlalchemy.sql.compiler import SQLCompiler

from billing.archive.columns import CHARGES, EVENTS


def clickhouse_sql(element: Any) -> str:
    clause = coercions.expect(roles.ColumnsClauseRole, element)
    return str(clause.compile(dialect=_DIALECT, compile_kwargs={"literal_binds": True}))


def quoted(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | Decimal):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, datetime):
        return f"fromUnixTimestamp64Micro({micros(value)}, 'UTC')"
    text = str(value).replace("\\", "\\\\").replace("'", "\\'").replace("\0", "\\0")
    return f"'{text}'"


def micros(moment: datetime) -> int:
    return int(moment.timestamp()) * 1_000_000 + moment.microsecond


class _Compiler(SQLCompiler):
    def visit_column(self, column: Any, *_args: Any, **_kw: Any) -> str:
        if column.table is EVENTS:
            return f"e.{column.name}"
        if column.table is CHARGES:
            return "e.request_id" if column.name == "request_id" else f"e.charge_{column.name}"
        raise ValueError(f"{column} is not stored")

    def render_literal_value(self, value: Any, type_: Any) -> str:
        return quoted(value)


class _Dialect(DefaultDialect):
    name = "clickhouse"
    statement_compiler = _Compiler
    supports_statement_cache = False


_DIALECT = _Dialect()
