"""The tables of moderation."""

import sqlalchemy as sa
from alembic import op

from migrations.column_types import BigKey, Json, UtcDateTime

revision = "0003_moderation"
down_revision = "0002_billing"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "moderation_appeals",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("request_id", sa.String(40), nullable=False),
        sa.Column("direction", sa.String(10), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("opened_at", UtcDateTime, nullable=False),
        sa.Column("opened_by", sa.String(40), nullable=False),
        sa.Column("decided_at", UtcDateTime, nullable=True),
        sa.Column("decided_by", sa.String(40), nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_moderation_appeals"),
        sa.UniqueConstraint(
            "request_id", "direction", name="uq_moderation_appeals_request_id_direction"
        ),
    )
    op.create_index("ix_moderation_appeals_tenant", "moderation_appeals", ["tenant_id", "status"])
    op.create_table(
        "moderation_daily",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("action", sa.String(10), nullable=False),
        sa.Column("categories", sa.String(500), nullable=False),
        sa.Column("decisions", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant_id", "at", "project_id", "action", "categories", name="pk_moderation_daily"
        ),
    )
    op.create_table(
        "moderation_decisions",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("request_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("direction", sa.String(10), nullable=False),
        sa.Column("action", sa.String(10), nullable=False),
        sa.Column("policy_version", sa.String(40), nullable=False),
        sa.Column("text_sha256", sa.String(64), nullable=False),
        sa.Column("categories", Json, nullable=False),
        sa.Column("scores", Json, nullable=False),
        sa.Column("spans", Json, nullable=False),
        sa.Column("view", sa.String(10), nullable=False),
        sa.Column("unscanned", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_moderation_decisions"),
        sa.UniqueConstraint(
            "request_id", "direction", name="uq_moderation_decisions_request_id_direction"
        ),
    )
    op.create_index(
        "ix_moderation_decisions_acted",
        "moderation_decisions",
        ["tenant_id", "at"],
        postgresql_where=sa.text("(action <> 'allow' or unscanned)"),
        sqlite_where=sa.text("(action <> 'allow' or unscanned)"),
    )
    op.create_index("ix_moderation_decisions_at", "moderation_decisions", ["at"])
    op.create_index(
        "ix_moderation_decisions_tenant_at", "moderation_decisions", ["tenant_id", "at"]
    )
    op.create_table(
        "moderation_policies",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("level", sa.String(20), nullable=False),
        sa.Column("target", sa.String(40), nullable=False),
        sa.Column("version", sa.String(40), nullable=False),
        sa.Column("document", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("retired_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_moderation_policies"),
    )
    op.create_index(
        "ix_moderation_policies_place", "moderation_policies", ["tenant_id", "level", "target"]
    )
    op.create_table(
        "moderation_strikes",
        sa.Column("request_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("category", sa.String(64), nullable=False),
        sa.Column("voided_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("request_id", name="pk_moderation_strikes"),
    )
    op.create_index("ix_moderation_strikes_key_at", "moderation_strikes", ["key_id", "at"])
    op.create_table(
        "moderation_suspensions",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("strikes", sa.Integer, nullable=False),
        sa.Column("lifted_at", UtcDateTime, nullable=True),
        sa.Column("lifted_by", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_moderation_suspensions"),
    )
    op.create_index("ix_moderation_suspensions_key", "moderation_suspensions", ["key_id"])


def downgrade() -> None:
    op.drop_table("moderation_suspensions")
    op.drop_table("moderation_strikes")
    op.drop_table("moderation_policies")
    op.drop_table("moderation_decisions")
    op.drop_table("moderation_daily")
    op.drop_table("moderation_appeals")
