"""Add-ons of tenants, and limits that follow billing plans."""

import sqlalchemy as sa
from alembic import op

from core.database import BigKey, Units, UtcDateTime

revision = "0034_add_ons"
down_revision = "0033_request_log_formats"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "add_ons",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("fee", Units(), nullable=False),
        sa.Column("interval", sa.String(length=10), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_add_ons")),
        sa.UniqueConstraint("name", name=op.f("uq_add_ons_name")),
    )
    op.create_table(
        "add_on_holdings",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("add_on_id", sa.String(length=40), nullable=False),
        sa.Column("quantity", sa.Integer(), nullable=False),
        sa.Column("starts_at", UtcDateTime(), nullable=False),
        sa.Column("ends_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint("quantity > 0", name=op.f("ck_add_on_holdings_quantity_positive")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_add_on_holdings")),
    )
    op.create_index("ix_add_on_holdings_tenant", "add_on_holdings", ["tenant_id", "starts_at"])
    op.add_column("plans", sa.Column("limits_plan", sa.String(length=120), nullable=True))
    for name in ("limits_set", "limits_before"):
        op.add_column("billing_accounts", sa.Column(name, sa.String(length=120), nullable=True))


def downgrade() -> None:
    for name in ("limits_set", "limits_before"):
        op.drop_column("billing_accounts", name)
    op.drop_column("plans", "limits_plan")
    op.drop_table("add_on_holdings")
    op.drop_table("add_ons")
