"""Closed days whose raw events and charges a store of moved days has."""

import sqlalchemy as sa
from alembic import op

from billing.columns import ORDERED_ID
from core.database import UtcDateTime

revision = "0036_moved_days"
down_revision = "0035_usage_by_origin"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "moved_days",
        sa.Column("day", UtcDateTime(), nullable=False),
        sa.Column("after_batch", sa.BigInteger(), nullable=False),
        sa.Column("last_batch", sa.BigInteger(), nullable=False),
        sa.Column("store", sa.String(100), nullable=False),
        sa.Column("floor_id", ORDERED_ID, nullable=False),
        sa.Column("moved_at", UtcDateTime(), nullable=True),
        sa.Column("dropped_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_moved_days")),
    )


def downgrade() -> None:
    op.drop_table("moved_days")
