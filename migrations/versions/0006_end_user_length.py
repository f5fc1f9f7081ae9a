"""Room for every `user` that the API accepts: 256 characters."""

import sqlalchemy as sa
from alembic import op

from billing import guards

revision = "0006_end_user_length"
down_revision = "0005_counted_by"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _resize(200, 256)


def downgrade() -> None:
    _resize(256, 200)


def _resize(old: int, new: int) -> None:
    if op.get_bind().dialect.name == "postgresql":
        using = f"left(end_user, {new})" if new < old else None
        op.alter_column(
            "usage_events",
            "end_user",
            existing_type=sa.String(old),
            type_=sa.String(new),
            postgresql_using=using,
        )
        return
    with op.batch_alter_table("usage_events") as table:
        table.alter_column("end_user", existing_type=sa.String(old), type_=sa.String(new))
    for statement in guards.sqlite_append_only("usage_events"):  # lost with the copied table
        op.execute(statement)
