"""Usage that Tollhouse did not serve, by source and id of its CloudEvents."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0019_reported_events"
down_revision = "0018_updates_in_maintenance"
branch_labels = None
depends_on = None


def upgrade() -> None:
    ordered = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
    op.create_table(
        "reported_events",
        sa.Column("source", sa.String(200), nullable=False),
        sa.Column("event_id", sa.String(200), nullable=False),
        sa.Column("request_id", ordered, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("reported_by", sa.String(40), nullable=False),
        sa.Column("reported_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("source", "event_id", name=op.f("pk_reported_events")),
    )


def downgrade() -> None:
    op.drop_table("reported_events")
