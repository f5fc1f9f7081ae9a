"""Marks by which a restored database is noticed, recoveries, and numbers that were issued before one."""

import sqlalchemy as sa
from alembic import op

from billing.columns import CURRENCY, ID
from core.database import BigKey, Json, UtcDateTime

revision = "0042_restores"
down_revision = "0041_markups_earned"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "restore_marks",
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("token", sa.String(40), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("entry_id", sa.BigInteger(), nullable=False),
        sa.Column("audit_id", sa.BigInteger(), nullable=False),
        sa.Column("command_id", sa.BigInteger(), nullable=False),
        sa.Column("numbers", Json, nullable=False),
        sa.Column("acts_sha256", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_restore_marks")),
    )
    op.create_table(
        "recoveries",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("found_at", UtcDateTime(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("finished_at", UtcDateTime(), nullable=True),
        sa.Column("report", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_recoveries")),
    )
    op.create_table(
        "reserved_numbers",
        sa.Column("seller_id", ID, nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("label", sa.String(40), nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("period_start", UtcDateTime(), nullable=True),
        sa.Column("document_id", ID, nullable=False),
        sa.Column("external_id", sa.String(120), nullable=True),
        sa.Column("currency", CURRENCY, nullable=False),
        sa.Column("due_minor", sa.BigInteger(), nullable=True),
        sa.Column("issued_at", UtcDateTime(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("reserved_at", UtcDateTime(), nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("seller_id", "kind", "number", name=op.f("pk_reserved_numbers")),
    )
    op.create_index("ix_reserved_numbers_tenant", "reserved_numbers", ["tenant_id", "period_start"])


def downgrade() -> None:
    for table in ("reserved_numbers", "recoveries", "restore_marks"):
        op.drop_table(table)
