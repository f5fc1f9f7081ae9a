"""Daily sums of usage by engine and by end user, filled from the batches that were summed before."""

import sqlalchemy as sa
from alembic import op

from core.database import Units, UtcDateTime

revision = "0035_usage_by_origin"
down_revision = "0034_add_ons"
branch_labels = None
depends_on = None
_ORIGINS = {
    "usage_engine_daily": ("engine_id", 80),
    "usage_end_user_daily": ("end_user", 256),
}
_QUANTITIES = (
    *("requests", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens"),
    *("adapter_requests", "gpu_seconds", "moderation_calls"),
)
_UNITS = ("audio_seconds", "images", "characters")
_AMOUNTS = (
    *("input_amount", "cached_amount", "output_amount", "waived_amount", "request_amount"),
    *("adapter_amount", "gpu_amount", "moderation_amount"),
)
_UNIT_AMOUNTS = ("audio_amount", "image_amount", "character_amount")
_SUMS = (*_QUANTITIES, *_UNITS, *_AMOUNTS, *_UNIT_AMOUNTS, "amount")


def upgrade() -> None:
    for table, (column, length) in _ORIGINS.items():
        op.create_table(
            table,
            sa.Column("tenant_id", sa.String(length=40), nullable=False),
            sa.Column("at", UtcDateTime(), nullable=False),
            sa.Column("project_id", sa.String(length=40), nullable=False),
            sa.Column(column, sa.String(length=length), nullable=False),
            *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _QUANTITIES),
            *(_zero(name, sa.BigInteger()) for name in _UNITS),
            *(sa.Column(name, Units(), nullable=False) for name in (*_AMOUNTS, "amount")),
            *(_zero(name, Units()) for name in _UNIT_AMOUNTS),
            sa.PrimaryKeyConstraint(
                *("tenant_id", "at", "project_id", column), name=op.f(f"pk_{table}")
            ),
        )
        op.execute(_filled(table, column))


def _zero(name: str, kind: sa.types.TypeEngine[int]) -> sa.Column[int]:
    return sa.Column(name, kind, nullable=False, server_default="0")


def _filled(table: str, column: str) -> str:
    day = "date_trunc('day', e.occurred_at)"
    if op.get_bind().dialect.name == "sqlite":
        day = "strftime('%Y-%m-%d 00:00:00.000000', e.occurred_at)"
    return (
        f"insert into {table} (tenant_id, at, project_id, {column}, {', '.join(_SUMS)})"
        f" select e.tenant_id, {day}, e.project_id, coalesce(e.{column}, ''),"
        f" {', '.join(f'sum(c.{name})' for name in _SUMS)}"
        " from usage_events e join charges c on c.request_id = e.request_id"
        " join usage_batches b on b.id = e.batch_id where b.summed_at is not null"
        f" group by e.tenant_id, {day}, e.project_id, coalesce(e.{column}, '')"
    )


def downgrade() -> None:
    for table in _ORIGINS:
        op.drop_table(table)
