"""Months that people signed off."""

import sqlalchemy as sa
from alembic import op

from core.database import Json, UtcDateTime

revision = "0023_signed_months"
down_revision = "0024_partitioned_charges"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "signed_months",
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("signed_by", sa.String(40), nullable=False),
        sa.Column("signed_at", UtcDateTime(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("checklist", Json, nullable=False),
        sa.Column("balances", Json, nullable=False),
        sa.PrimaryKeyConstraint("month", "signed_by", name=op.f("pk_signed_months")),
    )


def downgrade() -> None:
    op.drop_table("signed_months")
