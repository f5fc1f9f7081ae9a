"""Reported events by who reports them, and append-only: an organisation's ids are its own."""

import sqlalchemy as sa
from alembic import op

from billing import guards
from core.database import UtcDateTime

revision = "0022_reports_by_tenant"
down_revision = "0021_conversations"
branch_labels = None
depends_on = None
_TABLE = "reported_events"
_COMMON = "source, event_id, request_id, tenant_id, digest, reported_by, reported_at"


def upgrade() -> None:
    op.rename_table(_TABLE, f"old_{_TABLE}")
    _create(sa.Column("reporter", sa.String(40), nullable=False))
    op.execute(f"insert into {_TABLE} (reporter, {_COMMON}) select '', {_COMMON} from old_{_TABLE}")
    op.drop_table(f"old_{_TABLE}")
    _name_key("reporter", "source", "event_id")
    for statement in guards.append_only(op.get_bind().dialect.name, _TABLE):
        op.execute(statement)


def downgrade() -> None:
    """What organisations reported themselves is billed, but its ids are forgotten."""
    op.rename_table(_TABLE, f"old_{_TABLE}")
    _create()
    op.execute(
        f"insert into {_TABLE} ({_COMMON}) select {_COMMON} from old_{_TABLE} where reporter = ''"
    )
    op.drop_table(f"old_{_TABLE}")
    _name_key("source", "event_id")


def _create(*first: sa.Column[str]) -> None:
    """SQLite changes no primary key in place, and keeps its name when a table is renamed."""
    ordered = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
    sqlite = op.get_bind().dialect.name == "sqlite"
    names = [*(column.name for column in first), "source", "event_id"]
    key = [sa.PrimaryKeyConstraint(*names, name=op.f(f"pk_{_TABLE}"))] if sqlite else []
    op.create_table(
        _TABLE,
        *first,
        sa.Column("source", sa.String(200), nullable=False),
        sa.Column("event_id", sa.String(200), nullable=False),
        sa.Column("request_id", ordered, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("reported_by", sa.String(40), nullable=False),
        sa.Column("reported_at", UtcDateTime(), nullable=False),
        *key,
    )


def _name_key(*names: str) -> None:
    """On PostgreSQL the key's index must wait until the old table has given up the name."""
    if op.get_bind().dialect.name == "postgresql":
        op.create_primary_key(f"pk_{_TABLE}", _TABLE, list(names))
