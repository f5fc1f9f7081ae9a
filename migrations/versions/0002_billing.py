"""The tables of billing."""

revision = "0002_billing"
down_revision = "0001_core"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
