"""Stored responses of the Responses API, encrypted."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0017_stored_responses"
down_revision = "0016_seller_profile"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "stored_responses",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("previous_id", sa.String(length=80), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stored_responses")),
    )
    op.create_index("ix_stored_responses_tenant_id", "stored_responses", ["tenant_id", "id"])
    op.create_index("ix_stored_responses_expires_at", "stored_responses", ["expires_at"])
    op.create_table(
        "stored_response_items",
        sa.Column("response_id", sa.String(length=80), nullable=False),
        sa.Column("item_id", sa.String(length=80), nullable=False),
        sa.ForeignKeyConstraint(
            ["response_id"],
            ["stored_responses.id"],
            name=op.f("fk_stored_response_items_response_id_stored_responses"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("response_id", "item_id", name=op.f("pk_stored_response_items")),
    )
    op.create_index(op.f("ix_stored_response_items_item_id"), "stored_response_items", ["item_id"])


def downgrade() -> None:
    op.drop_table("stored_response_items")
    op.drop_table("stored_responses")
