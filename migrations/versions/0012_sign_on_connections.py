"""Single sign-on of a tenant: its own issuer of OpenID Connect."""

import sqlalchemy as sa
from alembic import op

from migrations.column_types import UtcDateTime

revision = "0012_sign_on_connections"
down_revision = "0011_audit_chain"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sign_on_connections",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("issuer", sa.String(1024), nullable=False),
        sa.Column("client_id", sa.String(400), nullable=False),
        sa.Column("client_secret", sa.Text(), nullable=False),
        sa.Column("new_member_role", sa.String(20), nullable=True),
        sa.Column("forced", sa.Boolean(), nullable=False),
        sa.Column("break_glass_id", sa.String(40), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("tested_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_sign_on_connections_tenant_id_tenants"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_sign_on_connections"),
        sa.UniqueConstraint("tenant_id", name="uq_sign_on_connections_tenant_id"),
    )


def downgrade() -> None:
    op.drop_table("sign_on_connections")
