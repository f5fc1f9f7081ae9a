"""Batches of usage that are not rated, as their events are not all there."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0041_refused_batches"
down_revision = "0045_adapter_quarantine"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage_batches", sa.Column("refused_at", UtcDateTime(), nullable=True))


def downgrade() -> None:
    op.drop_column("usage_batches", "refused_at")
