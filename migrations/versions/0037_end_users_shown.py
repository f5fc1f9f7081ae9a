"""An index on days by end user that holds what the page of usage shows of them."""

from alembic import op

revision = "0037_end_users_shown"
down_revision = "0036_moved_days"
branch_labels = None
depends_on = None
_NAME, _TABLE = "ix_usage_end_user_daily_shown", "usage_end_user_daily"
_SHOWN = ("requests", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens")


def upgrade() -> None:
    op.create_index(
        _NAME,
        _TABLE,
        ["tenant_id", "at", "end_user"],
        postgresql_include=["project_id", *_SHOWN],
    )


def downgrade() -> None:
    op.drop_index(_NAME, _TABLE)
