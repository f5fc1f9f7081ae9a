"""How much of a mark-up its parent has earned: what the child has paid of it."""

import sqlalchemy as sa
from alembic import op

revision = "0041_markups_earned"
down_revision = "0041_refused_batches"
branch_labels = None
depends_on = None
_COLUMNS = ("markup_promo_minor", "passed_minor", "promo_passed_minor")


def upgrade() -> None:
    for name in _COLUMNS:
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("child_invoices", column)
    op.execute(
        "update child_invoices set passed_minor = markup_minor"
        " where pays = 'self' and billed_by is not null"
    )


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("child_invoices", name)
