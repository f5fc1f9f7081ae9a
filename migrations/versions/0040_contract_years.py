"""The whole month of a short billing period, the contract years of a subscription, and an interval of
the commitment."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0040_contract_years"
down_revision = "0044_attached_to_first_key"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("billing_periods", sa.Column("whole_from", UtcDateTime(), nullable=True))
    op.add_column("billing_periods", sa.Column("whole_to", UtcDateTime(), nullable=True))
    op.add_column("subscriptions", sa.Column("years_since", UtcDateTime(), nullable=True))
    op.add_column("plans", sa.Column("commitment_interval", sa.String(10), nullable=True))


def downgrade() -> None:
    op.drop_column("plans", "commitment_interval")
    op.drop_column("subscriptions", "years_since")
    op.drop_column("billing_periods", "whole_to")
    op.drop_column("billing_periods", "whole_from")
