"""The hash chain of the audit log, and how far a stream of it was sent."""

import sqlalchemy as sa
from alembic import op

revision = "0011_audit_chain"
down_revision = "0010_labels"
branch_labels = None
depends_on = None
_COLUMNS = {"salt": 32, "content_sha256": 64, "digest": 64}


def upgrade() -> None:
    for name, length in _COLUMNS.items():
        column = sa.Column(name, sa.String(length), nullable=False, server_default="")
        op.add_column("audit_log", column)
    op.create_table(
        "audit_chains",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_audit_chains"),
    )
    op.add_column("webhook_endpoints", sa.Column("sent_id", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("webhook_endpoints", "sent_id")
    op.drop_table("audit_chains")
    for name in reversed(_COLUMNS):
        op.drop_column("audit_log", name)
