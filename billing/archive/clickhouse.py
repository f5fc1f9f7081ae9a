"""The archive on ClickHouse: ReplacingMergeTree tables by request id.

https://clickhouse.com/docs/engines/table-engines/mergetree-family/replacingmergetree
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Protocol

from billing.archive.base import Grouping, Rows, Totals, Wanted
from billing.archive.columns import (
    CHARGE_COLUMNS,
    CHARGES,
    EVENT_COLUMNS,
    EVENTS,
    LEFT_OUT,
    definitions,
)
from billing.tables.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS

EVENT_TABLE, CHARGE_TABLE = "tollhouse_usage_events", "tollhouse_charges"
_COUNTED = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
_CHARGED = tuple(name for name in QUANTITY_COLUMNS if name not in ("requests", *_COUNTED))
# As rating counts requests: not those that failed at our end, and not other kinds of usage.
_REQUESTS = "if(e.kind in ('gpu_seconds', 'moderation') or e.status >= 500, 0, e.quantity)"
_STRINGS = frozenset({"project_id", "key_id", "model", "adapter", "kind", "member_id"})


class Client(Protocol):
    """One ClickHouse: a server, or the engine in this process."""

    def command(self, statement: str) -> None: ...

    def insert(self, table: str, columns: Sequence[str], rows: Rows) -> None: ...

    def rows(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """`{name:Type}` in the query stands for a parameter."""


class ClickHouseArchive:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_prepared = False

    def store(self, events: Rows, charges: Rows) -> None:
        self._prepare()
        if events:
            self._client.insert(EVENT_TABLE, EVENT_COLUMNS, events)
        if charges:
            self._client.insert(CHARGE_TABLE, CHARGE_COLUMNS, charges)

    def totals(self, first: str, below: str) -> Totals:
        inside = "request_id >= {first:String} and request_id < {below:String}"
        found = {"first": first, "below": below}
        self._prepare()
        [(events, tokens)] = self._client.rows(
            "select count(), sum(input_tokens + output_tokens + waived_tokens)"
            f" from {EVENT_TABLE} final where {inside}",
            found,
        )
        [(charges, units)] = self._client.rows(
            f"select count(), sum(amount) from {CHARGE_TABLE} final where {inside}", found
        )
        return Totals(int(events), int(tokens or 0), int(charges), int(units or 0))

    def usage(self, wanted: Wanted, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        shown = ", ".join("null" if name in LEFT_OUT else f"e.{name}" for name in columns)
        where, parameters = _where("e", wanted)
        query = f"select {shown} from {EVENT_TABLE} e final where {where} order by e.request_id"
        yield from self._read(query, parameters)

    def charges(
        self, wanted: Wanted, columns: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[Any, ...]]:
        shown = ", ".join(f"{'e' if of == 'event' else 'c'}.{name}" for of, name in columns)
        where, parameters = _where("e", wanted)
        charged, _ = _where("c", wanted, charge=True)
        yield from self._read(
            f"select {shown} from (select * from {EVENT_TABLE} final) e"
            f" inner join (select * from {CHARGE_TABLE} c final where {charged}) c"
            f" on c.request_id = e.request_id where {where} order by e.request_id",
            parameters,
        )

    def buckets(self, wanted: Wanted, grouping: Grouping) -> Iterator[dict[str, Any]]:
        where, parameters = _where("e", wanted)
        charged, _ = _where("c", wanted, charge=True)
        for number, (name, values) in enumerate(grouping.matching):
            where += f" and e.{_checked(name)} in {{m{number}:Array(String)}}"
            parameters[f"m{number}"] = list(values)
        if grouping.batch is not None:
            where += f" and e.batch_job is {'not ' if grouping.batch else ''}null"
        by = [_group(name) for name in grouping.by]
        sums = [
            *((name, f"sum(c.{name})") for name in _CHARGED),
            *((name, f"sum(e.{name})") for name in _COUNTED),
            ("requests", f"sum({_REQUESTS})"),
            *((name, f"sum(c.{name})") for name in AMOUNT_COLUMNS),
        ]
        width = int(grouping.width_s)
        bucket = f"intDiv(toUnixTimestamp(e.occurred_at), {width}) * {width}"
        names = ["bucket", *grouping.by, *(name for name, _ in sums)]
        shown = ", ".join([bucket, *by, *(sum_of for _, sum_of in sums)])
        keys = ", ".join([bucket, *by])
        query = (
            f"select {shown} from (select * from {EVENT_TABLE} final) e"
            f" left join (select * from {CHARGE_TABLE} c final where {charged}) c"
            f" on c.request_id = e.request_id where {where} group by {keys} order by {keys}"
            " settings join_use_nulls = 1"
        )
        for row in self._read(query, parameters):
            yield dict(zip(names, row, strict=True))

    def _read(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        self._prepare()
        for row in self._client.rows(query, parameters):
            yield tuple(map(_value, row))

    def _prepare(self) -> None:
        """Create the tables, and the columns that a newer version has added."""
        if self._is_prepared:
            return
        for name, table, columns in (
            (EVENT_TABLE, EVENTS, EVENT_COLUMNS),
            (CHARGE_TABLE, CHARGES, CHARGE_COLUMNS),
        ):
            parts = definitions(table, columns)
            self._client.command(
                f"create table if not exists {name} ({', '.join(parts)})"
                " engine = ReplacingMergeTree partition by toYYYYMM(occurred_at)"
                " order by (tenant_id, request_id)"
            )
            for part in parts:
                self._client.command(f"alter table {name} add column if not exists {part}")
        self._is_prepared = True


def _value(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value)
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _where(table: str, wanted: Wanted, *, charge: bool = False) -> tuple[str, dict[str, Any]]:
    where = (
        f"{table}.occurred_at >= fromUnixTimestamp64Micro({{start:Int64}}, 'UTC')"
        f" and {table}.occurred_at < fromUnixTimestamp64Micro({{end:Int64}}, 'UTC')"
    )
    parameters: dict[str, Any] = {
        "start": int(wanted.start.timestamp() * 1_000_000),
        "end": int(wanted.end.timestamp() * 1_000_000),
    }
    for name, value, operator in (
        ("tenant_id", wanted.tenant_id, "="),
        ("project_id", "" if charge else wanted.project_id, "="),
        ("request_id", wanted.below, "<"),
    ):
        if value:
            where += f" and {table}.{name} {operator} {{{name}:String}}"
            parameters[name] = value
    return where, parameters


def _group(name: str) -> str:
    if name == "currency":
        return "c.currency"
    if name == "batch":
        return "toBool(e.batch_job is not null)"
    return f"e.{_checked(name)}"


def _checked(name: str) -> str:
    if name not in _STRINGS:
        raise ValueError(f"{name!r} is not archived")
    return name
