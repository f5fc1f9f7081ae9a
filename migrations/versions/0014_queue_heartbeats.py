"""The last heartbeat of each task queue."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0014_queue_heartbeats"
down_revision = "0013_frozen_sums"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "queue_heartbeats",
        sa.Column("queue", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("queue", name=op.f("pk_queue_heartbeats")),
    )


def downgrade() -> None:
    op.drop_table("queue_heartbeats")
