"""Exchange rates by day, for reports in one currency."""

import sqlalchemy as sa
from alembic import op

from core.database import Units, UtcDateTime

revision = "0028_exchange_rates"
down_revision = "0027_organisations"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "exchange_rates",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("base", sa.String(length=3), nullable=False),
        sa.Column("quote", sa.String(length=3), nullable=False),
        sa.Column("rate", Units(), nullable=False),
        sa.Column("recorded_at", UtcDateTime(), nullable=False),
        sa.Column("recorded_by", sa.String(length=40), nullable=False),
        sa.PrimaryKeyConstraint("day", "base", "quote", name=op.f("pk_exchange_rates")),
    )


def downgrade() -> None:
    op.drop_table("exchange_rates")
