"""The tables of the store of moved days, and the words of its expressions."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Float, func, literal

from billing.archive import opening
from billing.archive.clickhouse import ClickHouseArchive
from billing.archive.columns import COLUMNS, definitions, kind_of
from billing.archive.expressions import clickhouse_sql, micros, quoted
from billing.archive.hours import hour_definitions
from billing.archive.server import ServerClient
from billing.invoicing.tables import Invoice
from billing.usage.tables import Charge, UsageEventRow
from core.errors import DependencyDown, SettingError
from core.settings import Settings
from tests.billing.archive.recorded_clickhouse import Recorded

E, C = UsageEventRow, Charge
DAY = datetime(2026, 1, 2, tzinfo=UTC)
HOUR = timedelta(hours=1)


def test_every_call_makes_the_tables_first() -> None:
    calls: tuple[Any, ...] = (
        lambda made: made.store(DAY, []),
        lambda made: made.clear(DAY),
        lambda made: made.days(),
        lambda made: made.known((), DAY),
    )
    for call in calls:
        client = _fresh()
        call(ClickHouseArchive(client))
        assert client.commands[0].startswith(
            "create table if not exists tollhouse_usage (day Date, "
        )
    client = _fresh()
    ClickHouseArchive(client).ping()
    assert (client.pings, client.commands) == (1, [])


def _fresh(**answers: Any) -> Recorded:
    """With tables as they are to be."""
    client = Recorded()
    orders = {
        "tollhouse_usage": ("ReplacingMergeTree", "day", "tenant_id, occurred_at, request_id"),
        "tollhouse_hours": ("MergeTree", "day", "tenant_id, hour"),
        "tollhouse_hours_new": ("MergeTree", "day", "tenant_id, hour"),
    }
    plain = client.rows

    def _rows(query: str, parameters: Any) -> Any:
        name = parameters.get("name")
        if "system.tables" in query:
            client.asked.append((query, dict(parameters)))
            return iter([answers.get("table") or orders[name]])
        if "system.columns" in query:
            client.asked.append((query, dict(parameters)))
            parts = definitions() if name == "tollhouse_usage" else hour_definitions()
            there = [tuple(each.split(" ", 1)) for each in parts]
            return iter([each for each in there if each[0] not in answers.get("lacks", ())])
        return plain(query, parameters)

    client.rows = _rows  # type: ignore[method-assign]
    client.answers = {"select name from tollhouse_store": answers.get("names", [("b",), ("a",)])}
    return client


def test_the_tables_and_the_name_of_a_store() -> None:
    client = _fresh()
    archive = ClickHouseArchive(client)
    assert archive.identity() == "a" and archive.identity() == "a"
    index = ", index request request_id type bloom_filter granularity 4"
    hours = ", ".join(hour_definitions())
    assert client.commands == [
        f"create table if not exists tollhouse_usage (day Date, {', '.join(definitions())}{index})"
        " engine = ReplacingMergeTree partition by day order by (tenant_id, occurred_at, request_id)",
        *(
            f"create table if not exists {name} (day Date, {hours}) engine = MergeTree"
            " partition by day order by (tenant_id, hour)"
            for name in ("tollhouse_hours", "tollhouse_hours_new")
        ),
        "create table if not exists tollhouse_store (name String) engine = MergeTree order by name",
    ]
    assert len(client.asked) == 7 and client.inserts == []
    empty = _fresh(names=[])
    made = ClickHouseArchive(empty).identity()
    assert len(made) == 32 and empty.inserts == [("tollhouse_store", ("name",), [(made,)])]


def test_columns_that_are_missing_are_added_and_other_tables_are_named() -> None:
    client = _fresh(lacks=("status", "batch"))
    assert ClickHouseArchive(client).identity() == "a"
    added = [each for each in client.commands if each.startswith("alter")]
    assert added == [
        "alter table tollhouse_usage add column if not exists status Int64",
        "alter table tollhouse_hours add column if not exists batch Bool",
        "alter table tollhouse_hours_new add column if not exists batch Bool",
    ]
    cluster = ("ReplicatedReplacingMergeTree", "day", "tenant_id, occurred_at, request_id")
    with pytest.raises(
        DependencyDown, match="The table tollhouse_hours on ClickHouse is another one"
    ):
        ClickHouseArchive(_fresh(table=cluster)).identity()
    for table, said in (
        (("Log", "day", "x"), "another one: Log by (x), partitioned by day."),
        (
            ("ReplacingMergeTree", "", "x"),
            "another one: ReplacingMergeTree by (x), partitioned by nothing.",
        ),
    ):
        with pytest.raises(DependencyDown) as told:
            ClickHouseArchive(_fresh(table=table)).identity()
        assert f"The table tollhouse_usage on ClickHouse is {said}" in str(told.value)


def test_expressions_and_values_in_clickhouse_s_words() -> None:
    at = datetime(2026, 1, 2, 1, 0, 0, 5, tzinfo=timezone(HOUR))
    assert micros(at) == 1_767_312_000_000_005
    values = (None, True, False, 5, Decimal(7), 0.5, at, "a'b\\c\0")
    assert [quoted(each) for each in values] == [
        "NULL",
        "true",
        "false",
        "5",
        "7",
        "0.5",
        "fromUnixTimestamp64Micro(1767312000000005, 'UTC')",
        "'a\\'b\\\\c\\0'",
    ]
    assert clickhouse_sql(func.coalesce(E.adapter, literal(""))) == "coalesce(e.adapter, '')"
    assert clickhouse_sql(C.request_id == "x") == "e.request_id = 'x'"
    assert clickhouse_sql(C.amount > 5) == "e.charge_amount > 5"
    with pytest.raises(ValueError, match="is not stored"):
        clickhouse_sql(Invoice.id)
    with pytest.raises(TypeError, match="no ClickHouse type"):
        kind_of(Float())


def test_the_types_of_stored_columns() -> None:
    kinds = dict(each.split(" ", 1) for each in definitions())
    named = (
        "request_id",
        "adapter",
        "occurred_at",
        "status",
        "streamed",
        "first_token_ms",
        "paid_by",
    )
    assert [kinds[name] for name in named] == [
        "String",
        "Nullable(String)",
        "DateTime64(6, 'UTC')",
        "Int64",
        "Bool",
        "Nullable(Int64)",
        "Nullable(String)",
    ]
    of_charge = ("charge_amount", "charge_currency", "charge_requests", "charge_transaction_id")
    assert [kinds[name] for name in of_charge] == [
        "Nullable(Decimal(38, 0))",
        "Nullable(String)",
        "Nullable(Int64)",
        "Nullable(String)",
    ]
    assert list(kinds) == list(COLUMNS) and "charge_request_id" not in kinds


def test_which_settings_open_a_store() -> None:
    url, postgres = "clickhouses://user:pass@host:8123/db", "postgresql://host/db"
    assert opening.make_archive(Settings()) is None
    made = opening.make_archive(Settings(events_url=url, database_url=postgres))
    assert isinstance(made, ClickHouseArchive)
    client: Any = made._client
    assert isinstance(client, ServerClient) and (client._url, client._timeout_s) == (url, 10)
    with pytest.raises(SettingError, match="TOLLHOUSE_EVENTS_URL begins with 'http'"):
        opening.make_archive(Settings(events_url="http://host", database_url=postgres))
    with pytest.raises(SettingError, match="takes closed days from PostgreSQL"):
        opening.make_archive(Settings(events_url=url))
