"""The tables of moderation."""

import sqlalchemy as sa
from alembic import op

from core.database import BigKey, Json, UtcDateTime

revision = "0003_moderation"
down_revision = "0002_billing"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "moderation_policies",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("level", sa.String(length=20), nullable=False),
        sa.Column("target", sa.String(length=40), nullable=False),
        sa.Column("version", sa.String(length=40), nullable=False),
        sa.Column("document", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(length=40), nullable=False),
        sa.Column("retired_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_moderation_policies")),
    )
    op.create_index(
        "ix_moderation_policies_place", "moderation_policies", ["tenant_id", "level", "target"]
    )
    op.create_table(
        "moderation_decisions",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("direction", sa.String(length=10), nullable=False),
        sa.Column("action", sa.String(length=10), nullable=False),
        sa.Column("policy_version", sa.String(length=40), nullable=False),
        sa.Column("text_sha256", sa.String(length=64), nullable=False),
        sa.Column("categories", Json, nullable=False),
        sa.Column("scores", Json, nullable=False),
        sa.Column("spans", Json, nullable=False),
        sa.Column("view", sa.String(length=10), nullable=False),
        sa.Column("unscanned", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_moderation_decisions")),
        sa.UniqueConstraint(
            "request_id", "direction", name=op.f("uq_moderation_decisions_request_id_direction")
        ),
    )
    op.create_index(
        "ix_moderation_decisions_tenant_at", "moderation_decisions", ["tenant_id", "at"]
    )
    op.create_index("ix_moderation_decisions_at", "moderation_decisions", ["at"])
    acted = sa.text("(action <> 'allow' or unscanned)")
    op.create_index(
        "ix_moderation_decisions_acted",
        "moderation_decisions",
        ["tenant_id", "at"],
        postgresql_where=acted,
        sqlite_where=acted,
    )
    op.create_table(
        "moderation_daily",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("action", sa.String(length=10), nullable=False),
        sa.Column("categories", sa.String(length=500), nullable=False),
        sa.Column("decisions", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "at",
            "project_id",
            "action",
            "categories",
            name=op.f("pk_moderation_daily"),
        ),
    )
    op.create_table(
        "moderation_strikes",
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("category", sa.String(length=64), nullable=False),
        sa.Column("voided_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_moderation_strikes")),
    )
    op.create_index("ix_moderation_strikes_key_at", "moderation_strikes", ["key_id", "at"])
    op.create_table(
        "moderation_suspensions",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("strikes", sa.Integer(), nullable=False),
        sa.Column("lifted_at", UtcDateTime, nullable=True),
        sa.Column("lifted_by", sa.String(length=40), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_moderation_suspensions")),
    )
    op.create_index("ix_moderation_suspensions_key", "moderation_suspensions", ["key_id"])
    op.create_table(
        "moderation_appeals",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("direction", sa.String(length=10), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("status", sa.String(length=10), nullable=False),
        sa.Column("opened_at", UtcDateTime, nullable=False),
        sa.Column("opened_by", sa.String(length=40), nullable=False),
        sa.Column("decided_at", UtcDateTime, nullable=True),
        sa.Column("decided_by", sa.String(length=40), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_moderation_appeals")),
        sa.UniqueConstraint(
            "request_id", "direction", name=op.f("uq_moderation_appeals_request_id_direction")
        ),
    )
    op.create_index("ix_moderation_appeals_tenant", "moderation_appeals", ["tenant_id", "status"])


def downgrade() -> None:
    for table in ("appeals", "suspensions", "strikes", "daily", "decisions", "policies"):
        op.drop_table(f"moderation_{table}")
