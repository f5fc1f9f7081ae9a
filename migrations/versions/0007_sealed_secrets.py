"""Room for sealed secrets. What is stored is sealed by a task, because the key is no migration's."""

import sqlalchemy as sa
from alembic import op

revision = "0007_sealed_secrets"
down_revision = "0006_focus_versions"
branch_labels = None
depends_on = None
_COLUMNS = (
    ("webhook_endpoints", "secret", 80, False),
    ("webhook_endpoints", "authorization", 400, True),
    ("budgets", "webhook_secret", 80, True),
)


def upgrade() -> None:
    for table, column, length, nullable in _COLUMNS:
        with op.batch_alter_table(table) as batch:
            batch.alter_column(
                column,
                type_=sa.Text(),
                existing_type=sa.String(length),
                existing_nullable=nullable,
            )


def downgrade() -> None:
    """Sealed secrets do not fit: make new endpoints first."""
    for table, column, length, nullable in _COLUMNS:
        with op.batch_alter_table(table) as batch:
            batch.alter_column(
                column,
                type_=sa.String(length),
                existing_type=sa.Text(),
                existing_nullable=nullable,
            )
