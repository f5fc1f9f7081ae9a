"""Frozen sums of each day's usage."""

import sqlalchemy as sa
from alembic import op

from billing import guards
from core.database import Json, UtcDateTime

revision = "0008_closed_days"
down_revision = "0007_ledger_guards"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "closed_days",
        sa.Column("day", UtcDateTime, nullable=False),
        sa.Column("last_batch", sa.BigInteger(), nullable=False),
        sa.Column("sums", Json, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_closed_days")),
    )
    for statement in guards.append_only(op.get_bind().dialect.name, "closed_days"):
        op.execute(statement)


def downgrade() -> None:
    op.drop_table("closed_days")
