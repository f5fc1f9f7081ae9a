"""Seals secrets that are still stored in plain form, or under the token before."""

from typing import Any

from sqlalchemy import String, select, type_coerce, update
from sqlalchemy.orm import InstrumentedAttribute

from billing.notices.tables import Budget, WebhookEndpoint
from core.database import Database
from core.sealed_columns import SealedText, is_sealed, keys_in_force
from core.tenants.models import SignOnConnection

_AT_ONCE = 200
COLUMNS: tuple[tuple[type[Any], InstrumentedAttribute[Any]], ...] = (
    (WebhookEndpoint, WebhookEndpoint.secret),
    (WebhookEndpoint, WebhookEndpoint.authorization),
    (Budget, Budget.webhook_secret),
    (SignOnConnection, SignOnConnection.client_secret),
)


def seal_secrets(database: Database) -> int:
    """The number of secrets that were sealed; what no key opens stays. In transactions of bounded
    size: interrupted, it goes on with the next call. 0 without keys."""
    return sum(_seal(database, table, column) for table, column in COLUMNS)


def _seal(database: Database, table: type[Any], column: InstrumentedAttribute[Any]) -> int:
    keys = keys_in_force()
    if keys is None:
        return 0
    kind = column.type
    assert isinstance(kind, SealedText)
    with database.read() as session:
        rows = session.execute(
            select(table.id, type_coerce(column, String)).where(column.is_not(None))
        ).all()
    old = {row_id: raw for row_id, raw in rows if not keys.is_of_newest(kind.column, raw)}
    opened = {row_id: keys.open(kind.column, raw) for row_id, raw in old.items()}
    readable = [row_id for row_id, text in opened.items() if not is_sealed(text)]
    for first in range(0, len(readable), _AT_ONCE):
        with database.transaction() as session:
            for row_id in readable[first : first + _AT_ONCE]:
                unchanged = type_coerce(column, String) == old[row_id]
                session.execute(
                    update(table)
                    .where(table.id == row_id, unchanged)
                    .values({column: opened[row_id]})
                    .execution_options(synchronize_session=False)
                )
    return len(readable)
