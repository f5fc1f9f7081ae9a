"""Fallback chains and canaries of a key."""

import sqlalchemy as sa
from alembic import op

from core.database import Json

revision = "0026_key_routing"
down_revision = "0025_engine_time"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("routing", Json, nullable=True))


def downgrade() -> None:
    op.drop_column("api_keys", "routing")
