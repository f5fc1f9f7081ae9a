"""Stored chat completions, encrypted."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0032_stored_completions"
down_revision = "0031_units"
branch_labels = None
depends_on = None
TABLE = "stored_completions"


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=300), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stored_completions")),
    )
    columns = ["tenant_id", "created_at", "id"]
    op.create_index("ix_stored_completions_tenant_created", TABLE, columns)
    op.create_index("ix_stored_completions_expires_at", TABLE, ["expires_at"])


def downgrade() -> None:
    op.drop_table(TABLE)
