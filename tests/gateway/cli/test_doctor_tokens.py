"""The doctor names a machine whose operator token is not that of the others."""

from collections.abc import Iterator
from typing import Any

import pytest

from billing.notices import webhooks
from core.clock import FakeClock
from core.database import Database
from core.sealed_columns import ColumnKeys, seal_columns
from core.settings import Settings
from core.tenants.scope import scope_of_operator
from gateway.cli.doctor.check import Health
from gateway.cli.doctor.tokens import operator_token
from tests.billing.conftest import deployment_of

OURS, THEIRS = "the token of the gateways", "the token of a worker"


@pytest.fixture
def sealed(database: Database) -> Iterator[Database]:
    """A webhook's secret, sealed by the gateways."""
    made = deployment_of(database, FakeClock())
    seal_columns(ColumnKeys(OURS))
    with database.transaction() as session:
        webhooks.add(session, scope_of_operator("acme"), made.clock, "https://a.example.com/in")
    yield database
    seal_columns(None)


def found(database: Database, **settings: Any) -> Any:
    url = database.url
    return operator_token(Settings(database_url=url, **settings), FakeClock())


def test_the_same_token_is_good(sealed: Database) -> None:
    assert found(sealed, admin_token=OURS).health is Health.GOOD
    changed = found(sealed, admin_token=THEIRS, previous_admin_token=OURS)
    assert changed.health is Health.GOOD, changed


def test_another_token_is_named_with_the_remedy(sealed: Database) -> None:
    other = found(sealed, admin_token=THEIRS)
    assert other.health is Health.BAD and "1 of the 1 newest sealed rows" in other.says
    assert "TOLLHOUSE_ADMIN_TOKEN to one value" in other.next_step


def test_a_shared_database_without_a_shared_token_needs_a_look(database: Database) -> None:
    alone = found(database)
    assert alone.health is Health.WARN and "TOLLHOUSE_ADMIN_TOKEN" in alone.next_step
