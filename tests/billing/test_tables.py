"""What the tables of billing declare: what their migrations made, and what a new row begins with."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Dialect, Inspector, Table, UniqueConstraint, inspect
from sqlalchemy.orm import Mapper

from billing.subscriptions.tables import Subscription
from core.database import Base, Database

# What a new row holds where nothing is said, unless that is 0, False, "" or an empty collection.
DEFAULTS = {
    "billing_accounts.anchor_day": 1,
    "billing_accounts.collection": "manual",
    "billing_accounts.status": "active",
    "billing_accounts.timezone": "UTC",
    "credit_grants.priority": 100,
    "top_ups.enabled": True,
    "plans.grace_hours": 24,
    "plans.interval": "month",
    "plans.payment_terms_days": 14,
    "price_versions.adapter": "*",
    "sellers.next_credit_note": 1,
    "sellers.next_number": 1,
    "sellers.number_prefix": "TH",
}
# Keys that the database counts up; other keys are given.
COUNTED = {
    "add_on_holdings",
    "adjustments",
    "audit_runs",
    "credit_uses",
    "invoice_lines",
    "ledger_accounts",
    "ledger_entries",
    "outbox",
    "payment_outbox",
    "recoveries",
    "subscriptions",
    "tax_rates",
    "usage_batches",
    "usage_retention",
}


def _tables() -> Iterator[Table]:
    for mapper in Base.registry.mappers:
        assert isinstance(mapper, Mapper) and isinstance(mapper.local_table, Table)
        if mapper.class_.__module__.startswith("billing."):
            yield mapper.local_table


def test_a_new_row_begins_with_nothing_but_these_terms() -> None:
    found: dict[str, Any] = {}
    for table in _tables():
        for column in table.columns:
            if column.default is not None and column.default.is_scalar:
                found[f"{table.name}.{column.name}"] = column.default.arg
    assert len(found) > 60
    assert {name: each for name, each in found.items() if each or each is None} == DEFAULTS


def test_the_database_counts_these_keys() -> None:
    counted = {each.name for each in _tables() if each.autoincrement_column is not None}
    assert counted == COUNTED


def _declared(table: Table, dialect: Dialect) -> dict[str, Any]:
    uniques = [each for each in table.constraints if isinstance(each, UniqueConstraint)]
    return {
        "columns": {
            each.name: (each.type.compile(dialect), each.nullable) for each in table.columns
        },
        "key": {column.name for column in table.primary_key},
        "indices": {
            str(each.name): ([column.name for column in each.columns], bool(each.unique))
            for each in table.indexes
        },
        "uniques": sorted([column.name for column in each.columns] for each in uniques),
    }


def _made(found: Inspector, name: str, dialect: Dialect) -> dict[str, Any]:
    return {
        "columns": {
            each["name"]: (each["type"].compile(dialect), each["nullable"])
            for each in found.get_columns(name)
        },
        "key": set(found.get_pk_constraint(name)["constrained_columns"]),
        "indices": {
            str(each["name"]): (each["column_names"], bool(each["unique"]))
            for each in found.get_indexes(name)
        },
        "uniques": sorted(each["column_names"] for each in found.get_unique_constraints(name)),
    }


def test_columns_keys_and_indices_are_those_that_the_migrations_made(
    sqlite_database: Database,
) -> None:
    dialect, found = sqlite_database.db_engine.dialect, inspect(sqlite_database.db_engine)
    for table in _tables():
        assert _declared(table, dialect) == _made(found, table.name, dialect), table.name
    start, trial = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 15, tzinfo=UTC)
    assert Subscription(starts_at=start).fees_from == start
    assert Subscription(starts_at=start, billed_from=trial).fees_from == trial
