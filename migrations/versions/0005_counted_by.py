"""What counted the tokens of a usage event."""

import sqlalchemy as sa
from alembic import op

revision = "0005_counted_by"
down_revision = "0004_usage_tenant_daily"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage_events", sa.Column("counted_by", sa.String(length=10), nullable=True))


def downgrade() -> None:
    op.drop_column("usage_events", "counted_by")
