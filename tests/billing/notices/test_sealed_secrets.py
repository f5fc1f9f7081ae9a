"""Secrets of webhooks at rest: sealed with the operator's token. Rows of before are sealed later, and a
token that changed is noticed before anything is sent."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from billing.archive.opening import open_database
from billing.notices import signing, webhooks
from billing.notices.request_sinks import SinkOptions, set_sink, sink_of
from billing.notices.sealing import COLUMNS, seal_secrets
from billing.notices.tables import Budget, WebhookEndpoint
from core.clock import FakeClock
from core.database import Database
from core.errors import Unavailable
from core.sealed_columns import SEALED, ColumnKeys, is_sealed, keys_in_force, seal_columns
from core.settings import Settings
from core.tenants.operator import operator_token
from core.tenants.scope import scope_of_operator
from gateway.serving.request_log.receivers import Receivers

OLD, NEW = "the operator's first token", "the operator's second token"
NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _without_keys() -> Iterator[None]:
    before = keys_in_force()
    seal_columns(None)
    yield
    seal_columns(before)


def _add(database: Database) -> dict[str, str]:
    """Every kind of secret, and how it reads."""
    clock, scope = FakeClock(), scope_of_operator("acme")
    with database.transaction() as session:
        endpoint = webhooks.add(session, scope, clock, "https://a.example/hook", [])
        options = SinkOptions(authorization="Bearer of the receiver")
        sink = set_sink(session, scope, clock, "https://b.example/records", options)
        budget = Budget(
            id="bud_1", tenant_id="acme", scope="tenant", scope_id="acme", currency="USD", cap=1,
            window="day", hard=True, webhooks=["https://c.example"], created_at=NOW,
            webhook_secret=signing.new_secret(),
        )  # fmt: skip
        session.add(budget)
        return {
            "endpoint": endpoint.secret,
            "sink": sink.secret,
            "authorization": "Bearer of the receiver",
            "budget": budget.webhook_secret or "",
        }


def _raw(database: Database) -> list[str]:
    with database.read() as session:
        found = [
            session.execute(
                text(
                    f'select "{column.key}" from {table.__tablename__} where "{column.key}" is not null'
                )
            ).scalars()
            for table, column in COLUMNS
        ]
        return [value for values in found for value in values]


def _read(database: Database) -> dict[str, str]:
    with database.read() as session:
        endpoint, sink = sorted(session.query(WebhookEndpoint), key=lambda each: each.url)
        budget = session.get_one(Budget, "bud_1")
        return {
            "endpoint": endpoint.secret,
            "sink": sink.secret,
            "authorization": sink.authorization or "",
            "budget": budget.webhook_secret or "",
        }


def test_no_secret_is_stored_readable(database: Database) -> None:
    seal_columns(ColumnKeys(NEW))
    given = _add(database)
    raw = _raw(database)
    assert len(raw) == 4 and all(is_sealed(each) for each in raw)
    assert not [each for each in raw for secret in given.values() if secret in each]
    assert len({*raw}) == 4 and _read(database) == given
    assert seal_secrets(database) == 0


def test_rows_of_before_are_sealed_by_the_task(database: Database) -> None:
    given = _add(database)
    assert sorted(_raw(database)) == sorted(given.values()) and seal_secrets(database) == 0
    seal_columns(ColumnKeys(NEW))
    assert _read(database) == given, "until then they are read as they are"
    assert seal_secrets(database) == 4 and seal_secrets(database) == 0
    assert all(is_sealed(each) for each in _raw(database)) and _read(database) == given


def test_a_changed_token_is_named_and_the_one_before_seals_again(database: Database) -> None:
    seal_columns(ColumnKeys(OLD))
    given = _add(database)
    seal_columns(ColumnKeys(NEW))
    unread = _read(database)
    assert all(is_sealed(each) for each in unread.values()) and seal_secrets(database) == 0
    with pytest.raises(Unavailable, match="TOLLHOUSE_PREVIOUS_ADMIN_TOKEN"):
        signing.headers(unread["endpoint"], "id", NOW, b"{}")
    with database.read() as session:
        sink = sink_of(session, scope_of_operator("acme"))
    assert sink is not None
    assert "cannot be decrypted" in Receivers(Settings()).deliver("acme", sink, [], NOW)
    seal_columns(ColumnKeys(NEW, OLD))
    assert _read(database) == given and seal_secrets(database) == 4
    seal_columns(ColumnKeys(NEW))
    assert _read(database) == given


def test_a_sealed_text_cannot_take_another_columns_place() -> None:
    keys = ColumnKeys(NEW)
    sealed = keys.seal("budgets.webhook_secret", "s")
    assert keys.open("budgets.webhook_secret", sealed) == "s"
    assert keys.open("webhook_endpoints.secret", sealed) == sealed
    for wrong in (SEALED, SEALED + "é", SEALED + "AAAA", sealed[:-8]):
        assert keys.open("budgets.webhook_secret", wrong) == wrong
        assert not keys.is_of_newest("budgets.webhook_secret", wrong)


def test_the_database_of_the_settings_seals(sqlite_database: Database, tmp_path: Path) -> None:
    """With the token of the settings, or the one in the data directory; without one it reads plain."""

    def _opened(**more: Any) -> Database:
        return open_database(Settings(data_dir=tmp_path, database_url=sqlite_database.url, **more))

    plain = _opened()
    assert keys_in_force() is None
    given = _add(plain)
    plain.close()
    token = operator_token(Settings(data_dir=tmp_path))
    of_file = _opened()
    assert seal_secrets(of_file) == 4 and _read(of_file) == given
    of_file.close()
    rotated = _opened(admin_token=NEW, previous_admin_token=token)
    assert seal_secrets(rotated) == 4
    rotated.close()
    after = _opened(admin_token=NEW)
    assert _read(after) == given
    after.close()
