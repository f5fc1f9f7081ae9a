"""The store on ClickHouse: a ReplacingMergeTree by request, partitioned by closed day.

https://clickhouse.com/docs/engines/table-engines/mergetree-family/replacingmergetree

The hourly sums are a table that is computed for a whole day from its deduplicated rows and replaces the
day's partition. A materialised view would add a batch that is inserted twice twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Protocol

from billing.archive.columns import COLUMNS, HOURS, ROWS
from billing.archive.expressions import clickhouse_sql, micros, quoted
from billing.archive.frozen_sums import charge_row
from billing.archive.hours import HOUR_COLUMNS, bucket_query, hours_query
from billing.archive.layout import HOURS_NEW, Layout
from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.usage.raw_rows import Grouping, Reading, Rows, Sums, Wanted

_SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
_DAY = "day = {day:Date}"
# A request lies in one partition, so FINAL need not compare partitions with each other.
_ONE_PARTITION = " settings do_not_merge_across_partitions_select_final = 1"
_PERSONAL = "end_user", "client_request_id", "member_id", "labels"
_KEY = "usage_period_id", "bill_period_id", "price_version"


class Client(Protocol):
    """One ClickHouse: a server, or the engine in this process."""

    def ping(self) -> None:
        """One round trip, which takes some seconds at most."""

    def command(self, statement: str) -> None: ...

    def insert(self, table: str, columns: Sequence[str], rows: Rows) -> None: ...

    def rows(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """`{name:Type}` in the query stands for a parameter."""


class ClickHouseArchive:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._layout = Layout(client)

    def ping(self) -> None:
        self._client.ping()

    def identity(self) -> str:
        return self._layout.ready()

    def store(self, day: datetime, rows: Rows) -> None:
        self._layout.ready()
        if rows:
            at = day.date()
            self._client.insert(ROWS, ("day", *COLUMNS), [(at, *row) for row in rows])

    def clear(self, day: datetime) -> None:
        self._layout.ready()
        self._client.command(f"alter table {ROWS} drop partition '{day:%Y-%m-%d}'")

    def sum_hours(self, day: datetime) -> None:
        """Replacing a partition is atomic, so a reader sees the earlier sums or the new ones."""
        self._layout.ready()
        name = f"{day:%Y-%m-%d}"
        self._client.command(f"alter table {HOURS_NEW} drop partition '{name}'")
        columns = ", ".join(("day", *HOUR_COLUMNS))
        self._client.command(f"insert into {HOURS_NEW} ({columns}) {hours_query(name)}")
        where = f"select count() from {HOURS_NEW} where {_DAY}"
        [(count,)] = self._client.rows(where, _of(day))
        change = (
            f"replace partition '{name}' from {HOURS_NEW}" if count else f"drop partition '{name}'"
        )
        self._client.command(f"alter table {HOURS} {change}")
        self._client.command(f"alter table {HOURS_NEW} drop partition '{name}'")

    def days(self) -> list[datetime]:
        found = self._read(f"select distinct day from {ROWS} order by day", {})
        return [datetime(row[0].year, row[0].month, row[0].day, tzinfo=UTC) for row in found]

    def sums(self, day: datetime) -> Sums:
        names = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
        shown = ", ".join(f"sum({name})" for name in names)
        [(events, *counts, charges, units)] = self._read(
            f"select count(), {shown}, count(charge_transaction_id), sum(charge_amount)"
            f" from {ROWS} final where {_DAY}",
            _of(day),
        )
        found = dict(zip(names, (int(each or 0) for each in counts), strict=True))
        return {"events": int(events), **found, "charges": int(charges), "units": int(units or 0)}

    def groups(self, day: datetime) -> list[tuple[Any, ...]]:
        key = ["charge_tenant_id", *(f"charge_{name}" for name in _KEY)]
        key.append("charge_gpu_seconds + charge_moderation_calls = 0")
        source = f"{ROWS} final where {_DAY} and charge_transaction_id is not null"
        return self._charge_rows(day, source, key, [f"charge_{name}" for name in _SUMS])

    def hour_groups(self, day: datetime) -> list[tuple[Any, ...]]:
        source = f"{HOURS} where {_DAY} and currency is not null"
        return self._charge_rows(day, source, ("tenant_id", *_KEY, "tokens"), _SUMS)

    def _charge_rows(
        self, day: datetime, source: str, key: Sequence[str], summed: Sequence[str]
    ) -> list[tuple[Any, ...]]:
        shown = ", ".join([*key, *(f"sum({name})" for name in summed)])
        query = f"select {shown} from {source} group by {', '.join(key)}"
        return [charge_row(row) for row in self._read(query, _of(day))]

    def known(self, request_ids: Sequence[str], last_day: datetime) -> set[str]:
        rows = self._read(
            f"select request_id from {ROWS} where request_id in {{ids:Array(String)}}"
            " and day <= {day:Date}",
            {"ids": list(request_ids), **_of(last_day)},
        )
        return {row[0] for row in rows}

    def posted(self, transaction_ids: Sequence[str], last_day: datetime) -> dict[str, int]:
        rows = self._read(
            f"select charge_transaction_id, sum(charge_amount) from {ROWS} final"
            " where charge_transaction_id in {ids:Array(String)} and day <= {day:Date}"
            " group by charge_transaction_id",
            {"ids": list(transaction_ids), **_of(last_day)},
        )
        return {row[0]: int(row[1]) for row in rows}

    def erase(self, tenant_id: str, end_user: str | None) -> int:
        """Waits until the parts that held the name are rewritten."""
        if end_user is None:
            columns: tuple[str, ...] = _PERSONAL
            any_is = " or ".join(f"{name} is not null" for name in columns)
            where, named_here = f"tenant_id = {{tenant:String}} and ({any_is})", f"({any_is})"
        else:
            columns, named_here = _PERSONAL[:1], f"end_user = {quoted(end_user)}"
            where = "tenant_id = {tenant:String} and end_user = {user:String}"
        named = {"tenant": tenant_id} | ({"user": end_user} if end_user is not None else {})
        [(count,)] = self._read(f"select count() from {ROWS} final where {where}", named)
        if count:
            change = ", ".join(f"{name} = null" for name in columns)
            self._client.command(
                f"alter table {ROWS} update {change}"
                f" where tenant_id = {quoted(tenant_id)} and {named_here}"
                " settings mutations_sync = 2"
            )
        return int(count)

    def charged(
        self,
        last_day: datetime,
        key: Sequence[Any],
        sums: Sequence[Any],
        conditions: Sequence[Any],
    ) -> Iterator[tuple[Any, ...]]:
        where = "e.day <= {day:Date} and e.charge_transaction_id is not null"
        where += "".join(f" and ({clickhouse_sql(each)})" for each in conditions)
        keys = ", ".join(clickhouse_sql(each) for each in key)
        shown = ", ".join(f"sum({clickhouse_sql(each)})" for each in sums)
        query = f"select {keys}, {shown} from {ROWS} e final where {where} group by {keys}"
        yield from self._read(query + _ONE_PARTITION, _of(last_day))

    def rows(self, wanted: Wanted, reading: Reading) -> Iterator[tuple[Any, ...]]:
        where, parameters = _where(wanted)
        where += "".join(f" and ({clickhouse_sql(each)})" for each in reading.conditions)
        shown = ", ".join(clickhouse_sql(each) for each in reading.columns)
        down = " desc" if reading.falling else ""
        order = ", ".join(f"{clickhouse_sql(each)}{down}" for each in reading.order)
        limit = f" limit {int(reading.limit)}" if reading.limit is not None else ""
        query = f"select {shown} from {ROWS} e final where {where} order by {order}{limit}"
        yield from self._read(query + _ONE_PARTITION, parameters)

    def buckets(self, wanted: Wanted, grouping: Grouping) -> Iterator[dict[str, Any]]:
        where, parameters = _where(wanted)
        query, names = bucket_query(where, parameters, wanted, grouping)
        for row in self._read(query, parameters):
            yield dict(zip(names, row, strict=True))

    def _read(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        self._layout.ready()
        for row in self._client.rows(query, parameters):
            yield tuple(map(_value, row))


def _of(day: datetime) -> dict[str, Any]:
    return {"day": f"{day:%Y-%m-%d}"}


def _value(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return value


def _where(wanted: Wanted) -> tuple[str, dict[str, Any]]:
    """Usage is recorded after it occurred, by clocks that differ little, so days before the first
    cannot hold it."""
    where = (
        "e.occurred_at >= fromUnixTimestamp64Micro({start:Int64}, 'UTC')"
        " and e.occurred_at < fromUnixTimestamp64Micro({end:Int64}, 'UTC')"
        " and e.day >= {first_day:Date} and e.day <= {last_day:Date}"
    )
    first = max(wanted.start.date().toordinal() - 1, date(1970, 1, 1).toordinal())
    parameters: dict[str, Any] = {
        "start": micros(wanted.start),
        "end": micros(wanted.end),
        "first_day": date.fromordinal(first).isoformat(),
        "last_day": max(wanted.last_day.date(), date(1970, 1, 1)).isoformat(),
    }
    for name, value in (("tenant_id", wanted.tenant_id), ("project_id", wanted.project_id)):
        if value:
            where += f" and e.{name} = {{{name}:String}}"
            parameters[name] = value
    return where, parameters
