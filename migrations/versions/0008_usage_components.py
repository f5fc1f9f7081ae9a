"""How usage divides: what a provider wrote into its cache, reasoning, audio, images, searches, calls."""

import sqlalchemy as sa
from alembic import op

from migrations.column_types import Units

revision = "0008_usage_components"
down_revision = "0007_sealed_secrets"
branch_labels = None
depends_on = None
_TABLES = (
    *("charges", "closed_charges", "usage_hourly", "usage_daily", "service_hourly"),
    *("service_daily", "usage_engine_daily", "usage_end_user_daily"),
)
_QUANTITIES = (
    *("cache_write_5m_tokens", "cache_write_1h_tokens", "audio_input_tokens", "image_input_tokens"),
    *("reasoning_tokens", "audio_output_tokens", "image_output_tokens", "searches", "tool_calls"),
)
_AMOUNTS = (
    *("cache_write_5m_amount", "cache_write_1h_amount", "audio_input_amount", "image_input_amount"),
    *("reasoning_amount", "audio_output_amount", "image_output_amount", "search_amount"),
    "tool_call_amount",
)


def upgrade() -> None:
    op.add_column("usage_events", sa.Column("components", sa.String(320), nullable=True))
    for table in _TABLES:
        for name in _QUANTITIES:
            op.add_column(
                table, sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
            )
        for name in _AMOUNTS:
            op.add_column(table, sa.Column(name, Units, server_default="0", nullable=False))


def downgrade() -> None:
    """Charges of divided usage keep their sum and lose what it is made of."""
    for table in _TABLES:
        for name in (*_QUANTITIES, *_AMOUNTS):
            op.drop_column(table, name)
    op.drop_column("usage_events", "components")
