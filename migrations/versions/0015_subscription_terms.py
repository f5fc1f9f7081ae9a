"""Plans by the year and in advance, trials, and amounts agreed in a contract."""

import sqlalchemy as sa
from alembic import op

from core.database import Json, UtcDateTime

revision = "0015_subscription_terms"
down_revision = "0014_queue_heartbeats"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("interval", sa.String(length=10), nullable=False, server_default="month"),
        sa.Column("in_advance", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("trial_days", sa.Integer(), nullable=False, server_default="0"),
    ):
        op.add_column("plans", column)
    op.add_column("subscriptions", sa.Column("billed_from", UtcDateTime, nullable=True))
    op.add_column(
        "subscriptions", sa.Column("overrides", Json, nullable=False, server_default="{}")
    )


def downgrade() -> None:
    for name in ("overrides", "billed_from"):
        op.drop_column("subscriptions", name)
    for name in ("trial_days", "in_advance", "interval"):
        op.drop_column("plans", name)
