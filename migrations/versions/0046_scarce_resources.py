"""Until when a process has a message of the outbox that it sends."""

import sqlalchemy as sa
from alembic import op

revision = "0046_scarce_resources"
down_revision = "0037_end_users_shown"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("outbox", sa.Column("leased_until", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("outbox", "leased_until")
