"""Records of requests in another format, of a share of the requests, with the receiver's own key."""

import sqlalchemy as sa
from alembic import op

revision = "0033_request_log_formats"
down_revision = "0032_stored_completions"
branch_labels = None
depends_on = None
TABLE = "webhook_endpoints"


def upgrade() -> None:
    op.add_column(
        TABLE, sa.Column("format", sa.String(length=20), nullable=False, server_default="records")
    )
    op.add_column(
        TABLE, sa.Column("sample_percent", sa.Integer(), nullable=False, server_default="100")
    )
    op.add_column(TABLE, sa.Column("authorization", sa.String(length=400), nullable=True))


def downgrade() -> None:
    for name in ("authorization", "sample_percent", "format"):
        op.drop_column(TABLE, name)
