"""Prompt templates of tenants and their versions."""

import sqlalchemy as sa
from alembic import op

from core.database import Json, UtcDateTime

revision = "0029_prompt_templates"
down_revision = "0028_exchange_rates"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "prompt_templates",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("current_version", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("removed_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_prompt_templates_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prompt_templates")),
    )
    op.create_index("ix_prompt_templates_tenant_name", "prompt_templates", ["tenant_id", "name"])
    op.create_table(
        "prompt_versions",
        sa.Column("prompt_id", sa.String(length=40), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("messages", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ["prompt_id"],
            ["prompt_templates.id"],
            name=op.f("fk_prompt_versions_prompt_id_prompt_templates"),
        ),
        sa.PrimaryKeyConstraint("prompt_id", "version", name=op.f("pk_prompt_versions")),
    )


def downgrade() -> None:
    op.drop_table("prompt_versions")
    op.drop_table("prompt_templates")
