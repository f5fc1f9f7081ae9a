"""Adapters that may not be used, because engines stopped with them."""

import sqlalchemy as sa
from alembic import op

revision = "0045_adapter_quarantine"
down_revision = "0040_contract_years"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "adapters", sa.Column("quarantined_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.add_column(
        "adapters",
        sa.Column("quarantine_reason", sa.String(120), nullable=False, server_default=""),
    )


def downgrade() -> None:
    op.drop_column("adapters", "quarantine_reason")
    op.drop_column("adapters", "quarantined_at")
