"""Until when a process has a message of the outbox that it sends, and how large what tenants store is."""

import sqlalchemy as sa
from alembic import op

revision = "0046_scarce_resources"
down_revision = "0037_end_users_shown"
branch_labels = None
depends_on = None
# Each table, and its bytes as SQL.
_STORED = {
    "stored_responses": "length(sealed) + coalesce((select sum(length(e.sealed)) "
    "from stored_response_events e where e.response_id = stored_responses.id), 0)",
    "stored_completions": "length(sealed)",
    "conversations": "length(sealed) + coalesce((select sum(length(i.sealed)) "
    "from conversation_items i where i.conversation_id = conversations.id), 0)",
    "idempotency_records": "coalesce(length(response), 0)",
}


def upgrade() -> None:
    op.add_column("outbox", sa.Column("leased_until", sa.DateTime(timezone=True), nullable=True))
    for table, size in _STORED.items():
        column = sa.Column("stored_bytes", sa.BigInteger(), nullable=False, server_default="0")
        op.add_column(table, column)
        op.execute(f"update {table} set stored_bytes = {size}")
        op.create_index(f"ix_{table}_stored_bytes", table, ["tenant_id", "stored_bytes"])


def downgrade() -> None:
    for table in _STORED:
        op.drop_index(f"ix_{table}_stored_bytes", table)
        op.drop_column(table, "stored_bytes")
    op.drop_column("outbox", "leased_until")
