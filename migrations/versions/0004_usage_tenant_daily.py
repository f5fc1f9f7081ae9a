"""Renames `usage_house_daily` to `usage_tenant_daily`. A view keeps the old name readable."""

from alembic import op

revision = "0004_usage_tenant_daily"
down_revision = "0003_moderation"
branch_labels = None
depends_on = None

OLD, NEW = "usage_house_daily", "usage_tenant_daily"


def upgrade() -> None:
    _rename(OLD, NEW)
    op.execute(f"create view {OLD} as select * from {NEW}")


def downgrade() -> None:
    op.execute(f"drop view {OLD}")
    _rename(NEW, OLD)


def _rename(table: str, to: str) -> None:
    op.rename_table(table, to)
    if op.get_context().dialect.name == "postgresql":  # SQLite's primary keys have no name
        op.execute(f"alter table {to} rename constraint pk_{table} to pk_{to}")
