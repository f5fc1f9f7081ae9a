"""Receipts by request and engine: replicas may have run the same request."""

import sqlalchemy as sa
from alembic import op

from billing import guards
from core.database import UtcDateTime

revision = "0011_receipts_by_engine"
down_revision = "0010_taxes"
branch_labels = None
depends_on = None
_TABLE = "engine_receipts"


def upgrade() -> None:
    _rekey("request_id", "engine_id")


def downgrade() -> None:
    _allow_deletes()
    # The first receipt of a request stays.
    op.execute(
        f"delete from {_TABLE} where exists (select 1 from {_TABLE} as other"
        f" where other.request_id = {_TABLE}.request_id and other.engine_id < {_TABLE}.engine_id)"
    )
    _rekey("request_id")


def _rekey(*columns: str) -> None:
    dialect = op.get_bind().dialect.name
    if dialect == "postgresql":
        op.drop_constraint(f"pk_{_TABLE}", _TABLE, type_="primary")
        op.create_primary_key(f"pk_{_TABLE}", _TABLE, list(columns))
        return
    _copy(columns)
    for statement in guards.sqlite_append_only(_TABLE):  # dropped with the old table
        op.execute(statement)


def _copy(columns: tuple[str, ...]) -> None:
    """SQLite changes no primary key in place."""
    op.create_table(
        f"new_{_TABLE}",
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("engine_id", sa.String(length=80), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("generated_tokens", sa.Integer(), nullable=False),
        sa.Column("received_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint(*columns, name=op.f(f"pk_{_TABLE}")),
    )
    op.execute(f"insert into new_{_TABLE} select * from {_TABLE}")
    op.drop_table(_TABLE)
    op.rename_table(f"new_{_TABLE}", _TABLE)


def _allow_deletes() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.text("set local tollhouse.maintenance = 'on'"))
        return
    for name in ("update", "delete"):
        op.execute(f"drop trigger append_only_{_TABLE}_{name}")
