"""The tables of moderation."""

revision = "0003_moderation"
down_revision = "0002_billing"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
