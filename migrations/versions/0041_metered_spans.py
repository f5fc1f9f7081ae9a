"""When each account's usage is metered by Stripe, and invoices that serve for comparison only."""

import sqlalchemy as sa
from alembic import op

from core.database import UtcDateTime

revision = "0041_metered_spans"
down_revision = "0042_restores"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "metered_spans",
        sa.Column("tenant_id", sa.String(40), primary_key=True),
        sa.Column("starts_at", UtcDateTime(), primary_key=True),
        sa.Column("ends_at", UtcDateTime(), nullable=True),
    )
    op.add_column(
        "invoices", sa.Column("metered", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    # An account that left stripe_meters has no record of when it did.
    op.execute(
        "insert into metered_spans (tenant_id, starts_at, ends_at)"
        " select c.tenant_id, c.created_at,"
        " case when a.collection = 'stripe_meters' then null else c.created_at end"
        " from payment_outbox c join billing_accounts a on a.tenant_id = c.tenant_id"
        " where c.kind = 'usage' and c.subject_id = 'start'"
    )
    op.execute(
        "update invoices set metered = true where external_id is null and tenant_id in"
        " (select tenant_id from billing_accounts where collection = 'stripe_meters')"
    )


def downgrade() -> None:
    op.drop_column("invoices", "metered")
    op.drop_table("metered_spans")
