"""The database refuses transactions that do not sum to zero, and TRUNCATE of append-only tables."""

from alembic import op

from billing import guards

revision = "0007_ledger_guards"
down_revision = "0006_end_user_length"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for statement in guards.ledger_statements(op.get_bind().dialect.name):
        op.execute(statement)


def downgrade() -> None:
    for statement in guards.drop_ledger_statements(op.get_bind().dialect.name):
        op.execute(statement)
