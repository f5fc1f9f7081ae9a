"""Labels of requests: the names that a project allows, and usage by their values."""

from typing import Any

import sqlalchemy as sa
from alembic import op

from migrations.column_types import Json, Units, UtcDateTime

revision = "0010_labels"
down_revision = "0009_audit_log_erasure"
branch_labels = None
depends_on = None
_LABELS = sa.String(450)
_QUANTITIES = (
    *("requests", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens"),
    *("adapter_requests", "gpu_seconds", "moderation_calls"),
)
_UNITS = (
    *("audio_seconds", "images", "characters"),
    *("cache_write_5m_tokens", "cache_write_1h_tokens", "audio_input_tokens", "image_input_tokens"),
    *("reasoning_tokens", "audio_output_tokens", "image_output_tokens", "searches", "tool_calls"),
)
_AMOUNTS = ("input", "cached", "output", "waived", "request", "adapter", "gpu", "moderation")
_UNIT_AMOUNTS = (
    *("audio_amount", "image_amount", "character_amount"),
    *("cache_write_5m_amount", "cache_write_1h_amount", "audio_input_amount", "image_input_amount"),
    *("reasoning_amount", "audio_output_amount", "image_output_amount", "search_amount"),
    "tool_call_amount",
)
_KEY = (
    *("tenant_id", "at", "project_id", "key_id", "model", "adapter", "kind", "price_version"),
    *("usage_period_id", "bill_period_id", "labels"),
)
_WIDTHS = {"model": 120, "adapter": 120, "kind": 20, "labels": 450}


def upgrade() -> None:
    op.add_column(
        "projects", sa.Column("label_keys", Json, nullable=False, server_default=sa.text("'[]'"))
    )
    op.add_column("usage_events", sa.Column("labels", _LABELS, nullable=True))
    with op.batch_alter_table("budgets") as batch:
        batch.alter_column(
            "scope_id", type_=sa.String(120), existing_type=sa.String(40), existing_nullable=False
        )
    op.create_table(
        "label_sets",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("labels", _LABELS, nullable=False),
        sa.Column("first_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "labels", name="pk_label_sets"),
    )
    op.create_table(
        "usage_label_hourly",
        *(_key_column(name) for name in _KEY),
        sa.Column("currency", sa.String(3), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _QUANTITIES),
        *(_counted(name, sa.BigInteger()) for name in _UNITS),
        *(sa.Column(f"{name}_amount", Units, nullable=False) for name in _AMOUNTS),
        *(_counted(name, Units) for name in _UNIT_AMOUNTS),
        sa.Column("amount", Units, nullable=False),
        sa.PrimaryKeyConstraint(*_KEY, name="pk_usage_label_hourly"),
    )
    op.create_index("ix_usage_label_hourly_bill_period", "usage_label_hourly", ["bill_period_id"])


def downgrade() -> None:
    op.drop_table("usage_label_hourly")
    op.drop_table("label_sets")
    with op.batch_alter_table("budgets") as batch:
        batch.alter_column(
            "scope_id", type_=sa.String(40), existing_type=sa.String(120), existing_nullable=False
        )
    op.drop_column("usage_events", "labels")
    op.drop_column("projects", "label_keys")


def _key_column(name: str) -> Any:
    kind = UtcDateTime if name == "at" else sa.String(_WIDTHS.get(name, 40))
    return sa.Column(name, kind, nullable=False)


def _counted(name: str, kind: Any) -> Any:
    return sa.Column(name, kind, nullable=False, server_default="0")
