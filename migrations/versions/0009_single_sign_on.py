"""Invitations of members, and the e-mail domains of tenants, for single sign-on."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0009_single_sign_on"
down_revision = "0008_closed_days"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenant_domains",
        sa.Column("domain", sa.String(length=253), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("proved_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("domain", name=op.f("pk_tenant_domains")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_tenant_domains_tenant_id_tenants")
        ),
    )
    op.add_column("members", sa.Column("invitation_sha256", sa.String(length=64), nullable=True))
    op.add_column("members", sa.Column("invitation_expires_at", UtcDateTime, nullable=True))
    op.create_index(
        "ix_members_tenant_subject", "members", ["tenant_id", "oidc_subject"], unique=True
    )
    op.create_index("ix_members_invitation", "members", ["invitation_sha256"], unique=True)


def downgrade() -> None:
    op.drop_index("ix_members_invitation", "members")
    op.drop_index("ix_members_tenant_subject", "members")
    op.drop_column("members", "invitation_expires_at")
    op.drop_column("members", "invitation_sha256")
    op.drop_table("tenant_domains")
