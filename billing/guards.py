"""Triggers that reject changes of append-only rows and of final invoices.

The revisions of the schema create them. A retention job or a test that must delete rows calls
`allow_maintenance` in its transaction.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import text
from sqlalchemy.orm import Session


def truncate_guard(table: str) -> str:
    return (
        f"create trigger append_only_truncate before truncate on {table} "
        "for each statement execute function tollhouse_append_only()"
    )


def allow_maintenance(session: Session) -> None:
    """Disable the append-only triggers for this transaction. PostgreSQL only; used by retention."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("set local tollhouse.maintenance = 'on'"))


@contextmanager
def open_for_update(session: Session, table: str) -> Iterator[None]:
    """Let rows of an append-only table be updated inside the block, on both databases."""
    if session.get_bind().dialect.name == "postgresql":
        allow_maintenance(session)
        yield
        session.execute(text("set local tollhouse.maintenance = 'off'"))
        return
    name = f"append_only_{table}_update"
    known = text("select sql from sqlite_master where type = 'trigger' and name = :name")
    trigger = session.execute(known, {"name": name}).scalar_one()
    session.execute(text(f"drop trigger {name}"))
    yield
    session.execute(text(trigger))
