"""Places of taxation, exemption certificates, and the answers of tax services."""

import sqlalchemy as sa
from alembic import op

from core.database import Json, UtcDateTime

revision = "0010_taxes"
down_revision = "0009_single_sign_on"
branch_labels = None
depends_on = None


def upgrade() -> None:
    region = sa.Column("tax_region", sa.String(length=20), nullable=False, server_default="")
    op.add_column("sellers", region)
    code = sa.Column("postal_code", sa.String(length=20), nullable=False, server_default="")
    op.add_column("billing_accounts", code)
    op.create_table(
        "tax_exemptions",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.String(length=80), nullable=False),
        sa.Column("region", sa.String(length=20), nullable=False),
        sa.Column("valid_from", UtcDateTime, nullable=False),
        sa.Column("valid_to", UtcDateTime, nullable=True),
        sa.Column("recorded_by", sa.String(length=40), nullable=False),
        sa.Column("recorded_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tax_exemptions")),
    )
    op.create_index("ix_tax_exemptions_tenant", "tax_exemptions", ["tenant_id", "valid_from"])
    op.create_table(
        "tax_quotes",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("taxes", Json, nullable=False),
        sa.Column("asked_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_tax_quotes")),
    )


def downgrade() -> None:
    op.drop_table("tax_quotes")
    op.drop_table("tax_exemptions")
    op.drop_column("billing_accounts", "postal_code")
    op.drop_column("sellers", "tax_region")
