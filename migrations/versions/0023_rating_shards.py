"""Shards of tenants, which rating workers lease."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0023_rating_shards"
down_revision = "0022_reports_by_tenant"
branch_labels = None
depends_on = None
_SHARDS = 16


def upgrade() -> None:
    op.add_column(
        "usage_batches", sa.Column("shard", sa.SmallInteger(), nullable=False, server_default="0")
    )
    shards = op.create_table(
        "rating_shards",
        sa.Column("shard", sa.SmallInteger(), nullable=False, autoincrement=False),
        sa.Column("worker", sa.String(40), nullable=True),
        sa.Column("leased_until", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("shard", name=op.f("pk_rating_shards")),
    )
    op.bulk_insert(shards, [{"shard": number} for number in range(_SHARDS)])
    op.create_table(
        "rating_workers",
        sa.Column("worker", sa.String(40), nullable=False),
        sa.Column("alive_until", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("worker", name=op.f("pk_rating_workers")),
    )


def downgrade() -> None:
    op.drop_table("rating_workers")
    op.drop_table("rating_shards")
    op.drop_column("usage_batches", "shard")
