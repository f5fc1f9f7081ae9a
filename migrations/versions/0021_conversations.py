"""Conversations and background responses of the Responses API, encrypted."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0021_conversations"
down_revision = "0020_money_acts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_conversations")),
    )
    op.create_index("ix_conversations_tenant_id", "conversations", ["tenant_id", "id"])
    op.create_index("ix_conversations_expires_at", "conversations", ["expires_at"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.String(length=80), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.String(length=80), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["conversation_id"],
            ["conversations.id"],
            name=op.f("fk_conversation_items_conversation_id_conversations"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("conversation_id", "position", name=op.f("pk_conversation_items")),
    )
    op.create_index(
        "ix_conversation_items_item_id",
        "conversation_items",
        ["conversation_id", "item_id"],
        unique=True,
    )
    op.add_column("stored_responses", sa.Column("status", sa.String(length=20), nullable=True))
    op.add_column("stored_responses", sa.Column("lease_until", UtcDateTime, nullable=True))
    op.create_index("ix_stored_responses_lease_until", "stored_responses", ["lease_until"])
    op.create_table(
        "stored_response_events",
        sa.Column("response_id", sa.String(length=80), nullable=False),
        sa.Column("first", sa.Integer(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["response_id"],
            ["stored_responses.id"],
            name=op.f("fk_stored_response_events_response_id_stored_responses"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("response_id", "first", name=op.f("pk_stored_response_events")),
    )


def downgrade() -> None:
    op.drop_table("stored_response_events")
    op.drop_index("ix_stored_responses_lease_until", "stored_responses")
    op.drop_column("stored_responses", "lease_until")
    op.drop_column("stored_responses", "status")
    op.drop_table("conversation_items")
    op.drop_table("conversations")
