"""The keys of a second name of an end user: a request may have both `user` and `safety_identifier`."""

import sqlalchemy as sa
from alembic import op

revision = "0005_safety_keys"
down_revision = "0004_end_user_keys"
branch_labels = None
depends_on = None
_OF_TENANTS = ("idempotency_records", "stored_completions", "stored_responses")
_TABLES = (*_OF_TENANTS, "conversation_items")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("safety_key", sa.String(64), nullable=True))
        columns = ["tenant_id", "safety_key"] if table in _OF_TENANTS else ["safety_key"]
        op.create_index(f"ix_{table}_safety_key", table, columns)


def downgrade() -> None:
    for table in _TABLES:
        op.drop_index(f"ix_{table}_safety_key", table)
        op.drop_column(table, "safety_key")
