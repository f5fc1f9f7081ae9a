"""Organisations above organisations, and what invoices of children pass on."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0027_organisations"
down_revision = "0026_key_routing"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "organisation_links",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("parent_id", sa.String(length=40), nullable=False),
        sa.Column("pays", sa.String(length=10), nullable=False),
        sa.Column("markup_ppm", sa.BigInteger(), nullable=False),
        sa.Column("since", UtcDateTime(), nullable=False),
        sa.Column("changed_by", sa.String(length=40), nullable=False),
        sa.CheckConstraint(
            "tenant_id <> parent_id", name=op.f("ck_organisation_links_not_its_own_parent")
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_organisation_links")),
    )
    op.create_index("ix_organisation_links_parent", "organisation_links", ["parent_id"])
    op.create_table(
        "child_invoices",
        sa.Column("invoice_id", sa.String(length=40), nullable=False),
        sa.Column("parent_id", sa.String(length=40), nullable=False),
        sa.Column("child_id", sa.String(length=40), nullable=False),
        sa.Column("pays", sa.String(length=10), nullable=False),
        sa.Column("period_start", UtcDateTime(), nullable=False),
        sa.Column("period_end", UtcDateTime(), nullable=False),
        sa.Column("charged_minor", sa.BigInteger(), nullable=False),
        sa.Column("markup_minor", sa.BigInteger(), nullable=False),
        sa.Column("billed_by", sa.String(length=40), nullable=True),
        sa.PrimaryKeyConstraint("invoice_id", name=op.f("pk_child_invoices")),
    )
    op.create_index("ix_child_invoices_parent", "child_invoices", ["parent_id", "billed_by"])


def downgrade() -> None:
    op.drop_table("child_invoices")
    op.drop_table("organisation_links")
