"""Usage in seconds of audio, images and characters, with its quantities and amounts."""

import sqlalchemy as sa
from alembic import op

from core.database import Units

revision = "0031_units"
down_revision = "0030_bank_lines"
branch_labels = None
depends_on = None
_TABLES = (
    *("charges", "usage_hourly", "usage_daily"),
    *("service_hourly", "service_daily", "closed_charges"),
)
_QUANTITIES = ("audio_seconds", "images", "characters")
_AMOUNTS = ("audio_amount", "image_amount", "character_amount")


def upgrade() -> None:
    op.add_column(
        "usage_events", sa.Column("units", sa.BigInteger(), nullable=False, server_default="0")
    )
    for table in _TABLES:
        for name in _QUANTITIES:
            column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
            op.add_column(table, column)
        for name in _AMOUNTS:
            op.add_column(table, sa.Column(name, Units(), nullable=False, server_default="0"))


def downgrade() -> None:
    for table in _TABLES:
        for name in (*_QUANTITIES, *_AMOUNTS):
            op.drop_column(table, name)
    op.drop_column("usage_events", "units")
