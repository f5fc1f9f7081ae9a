"""The keys of end users, by which what is stored of their texts is erased."""

import sqlalchemy as sa
from alembic import op

revision = "0004_end_user_keys"
down_revision = "0003_moderation"
branch_labels = None
depends_on = None
_OF_TENANTS = ("idempotency_records", "stored_completions", "stored_responses")
_TABLES = (*_OF_TENANTS, "conversation_items")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("end_user_key", sa.String(64), nullable=True))
        columns = ["tenant_id", "end_user_key"] if table in _OF_TENANTS else ["end_user_key"]
        op.create_index(f"ix_{table}_end_user_key", table, columns)


def downgrade() -> None:
    for table in _TABLES:
        op.drop_index(f"ix_{table}_end_user_key", table)
        op.drop_column(table, "end_user_key")
