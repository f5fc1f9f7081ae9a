"""Busy time of engines on receipts and usage events, its daily sums, and what engines cost."""

import sqlalchemy as sa
from alembic import op

from core.database import Units, UtcDateTime

revision = "0025_engine_time"
down_revision = "0023_signed_months"
branch_labels = None
depends_on = None
_COUNTED = ("usage_events", "engine_receipts")


def upgrade() -> None:
    for table in _COUNTED:
        column = sa.Column("busy_us", sa.BigInteger(), nullable=False, server_default="0")
        op.add_column(table, column)
    op.create_table(
        "engine_time_daily",
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("adapter", sa.String(length=120), nullable=False),
        sa.Column("engine_id", sa.String(length=80), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("answers", sa.BigInteger(), nullable=False),
        sa.Column("busy_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            *("at", "tenant_id", "model", "adapter", "engine_id", "currency"),
            name=op.f("pk_engine_time_daily"),
        ),
    )
    op.create_table(
        "engine_prices",
        sa.Column("pool", sa.String(length=120), nullable=False),
        sa.Column("starts_at", UtcDateTime(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("per_hour", Units(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("created_by", sa.String(length=120), nullable=False),
        sa.PrimaryKeyConstraint("pool", "starts_at", name=op.f("pk_engine_prices")),
    )


def downgrade() -> None:
    op.drop_table("engine_prices")
    op.drop_table("engine_time_daily")
    for table in _COUNTED:
        op.drop_column(table, "busy_us")
