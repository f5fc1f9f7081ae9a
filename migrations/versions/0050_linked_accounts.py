"""Members know who saw the link by which their account of single sign-on was linked."""

import sqlalchemy as sa
from alembic import op

revision = "0050_linked_accounts"
down_revision = "0041_metered_spans"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("members", sa.Column("oidc_by", sa.String(20), nullable=True))


def downgrade() -> None:
    op.drop_column("members", "oidc_by")
