"""The tables on ClickHouse, and whether what is there are these."""

from typing import Any
from uuid import uuid4

from billing.archive.columns import HOURS, ROWS, definitions
from billing.archive.hours import hour_definitions
from core.errors import DependencyDown

HOURS_NEW = "tollhouse_hours_new"  # a day's sums until they replace the earlier ones
STORE = "tollhouse_store"
# A day of usage is one partition. Pages read one tenant by time; a request is found by the index.
_LAYOUTS = {
    ROWS: ("ReplacingMergeTree", "tenant_id, occurred_at, request_id"),
    HOURS: ("MergeTree", "tenant_id, hour"),
    HOURS_NEW: ("MergeTree", "tenant_id, hour"),
}


class Layout:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._identity = ""

    def ready(self) -> str:
        """Create the tables, and the columns that a newer version has added; returns the store's name.
        DependencyDown if other tables have these names."""
        if self._identity:
            return self._identity
        for name, parts in (
            (ROWS, definitions()),
            (HOURS, hour_definitions()),
            (HOURS_NEW, hour_definitions()),
        ):
            self._table(name, parts)
        self._client.command(
            f"create table if not exists {STORE} (name String) engine = MergeTree order by name"
        )
        names = [row[0] for row in self._client.rows(f"select name from {STORE}", {})]
        if not names:
            names = [uuid4().hex]
            self._client.insert(STORE, ("name",), [tuple(names)])
        self._identity = min(names)  # two processes that began at once agree
        return self._identity

    def _table(self, name: str, parts: list[str]) -> None:
        engine, order = _LAYOUTS[name]
        index = ", index request request_id type bloom_filter granularity 4"
        self._client.command(
            f"create table if not exists {name} (day Date, {', '.join(parts)}"
            f"{index if name == ROWS else ''}) engine = {engine} partition by day order by ({order})"
        )
        [found] = self._client.rows(
            "select engine, partition_key, sorting_key from system.tables"
            " where database = currentDatabase() and name = {name:String}",
            {"name": name},
        )
        # ReplicatedReplacingMergeTree of a cluster, which an operator has made, is right too.
        if not str(found[0]).endswith(engine) or tuple(found[1:]) != ("day", order):
            raise DependencyDown(
                f"The table {name} on ClickHouse is another one: {found[0]} by ({found[2]}),"
                f" partitioned by {found[1] or 'nothing'}.",
                next_step="Name an empty database in TOLLHOUSE_EVENTS_URL.",
            )
        there = {
            row[0]: row[1]
            for row in self._client.rows(
                "select name, type from system.columns"
                " where database = currentDatabase() and table = {name:String}",
                {"name": name},
            )
        }
        for part in parts:
            column, _, kind = part.partition(" ")
            if column not in there:
                self._client.command(f"alter table {name} add column if not exists {part}")
            elif there[column] != kind:
                raise DependencyDown(
                    f"The column {column} of {name} on ClickHouse is {there[column]}, not {kind}.",
                    next_step="Name an empty database in TOLLHOUSE_EVENTS_URL.",
                )
