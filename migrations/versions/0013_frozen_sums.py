"""Sums of closed days by period, account and grant; signatures. Days are closed anew."""

import sqlalchemy as sa
from alembic import op

from billing import guards
from core.database import Json, Units, UtcDateTime

revision = "0013_frozen_sums"
down_revision = "0012_standard_table_names"
branch_labels = None
depends_on = None
_NEW = ("closed_charges", "closed_units")
# As of this revision.
_QUANTITIES = (
    *("requests", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens"),
    *("adapter_requests", "gpu_seconds", "moderation_calls"),
)
_AMOUNTS = (
    *("input_amount", "cached_amount", "output_amount", "waived_amount", "request_amount"),
    *("adapter_amount", "gpu_amount", "moderation_amount", "amount"),
)


def upgrade() -> None:
    op.drop_table("closed_days")
    op.create_table(
        "closed_days",
        sa.Column("day", UtcDateTime, nullable=False),
        sa.Column("last_batch", sa.BigInteger(), nullable=False),
        sa.Column("sums", Json, nullable=False),
        sa.Column("frozen", Json, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("signature", sa.String(length=100), nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_closed_days")),
    )
    key = ("day", "tenant_id", "usage_period_id", "bill_period_id", "price_version", "tokens")
    op.create_table(
        "closed_charges",
        sa.Column("day", UtcDateTime, nullable=False),
        *(sa.Column(name, sa.String(length=40), nullable=False) for name in key[1:5]),
        sa.Column("tokens", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _QUANTITIES),
        *(sa.Column(name, Units, nullable=False) for name in _AMOUNTS),
        sa.PrimaryKeyConstraint(*key, name=op.f("pk_closed_charges")),
    )
    op.create_index("ix_closed_charges_usage_period", "closed_charges", ["usage_period_id"])
    op.create_index("ix_closed_charges_bill_period", "closed_charges", ["bill_period_id"])
    op.create_table(
        "closed_units",
        sa.Column("day", UtcDateTime, nullable=False),
        sa.Column("kind", sa.String(length=10), nullable=False),
        sa.Column("key", sa.String(length=40), nullable=False),
        sa.Column("units", Units, nullable=False),
        sa.PrimaryKeyConstraint("day", "kind", "key", name=op.f("pk_closed_units")),
    )
    op.create_index("ix_closed_units_key", "closed_units", ["kind", "key"])
    for table in ("closed_days", *_NEW):
        for statement in guards.append_only(op.get_bind().dialect.name, table):
            op.execute(statement)


def downgrade() -> None:
    for table in _NEW:
        op.drop_table(table)
    op.execute("drop table closed_days")
    op.create_table(
        "closed_days",
        sa.Column("day", UtcDateTime, nullable=False),
        sa.Column("last_batch", sa.BigInteger(), nullable=False),
        sa.Column("sums", Json, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_closed_days")),
    )
    for statement in guards.append_only(op.get_bind().dialect.name, "closed_days"):
        op.execute(statement)
