"""Maintenance may update rows of append-only tables, not only delete them (PostgreSQL)."""

from alembic import op

from billing import guards

revision = "0018_updates_in_maintenance"
down_revision = "0017_stored_responses"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(guards.append_only_function())


def downgrade() -> None:
    """The function of before rejects nothing else, and stays."""
