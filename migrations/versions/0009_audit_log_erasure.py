"""The erasure of a tenant may empty entries of its audit log, as it may other append-only rows."""

from alembic import op

revision = "0009_audit_log_erasure"
down_revision = "0008_usage_components"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _guard(
        """if tg_op = 'UPDATE' and current_setting('tollhouse.maintenance', true) = 'on' then
                return new;
            end if;"""
    )


def downgrade() -> None:
    _guard("")


def _guard(but: str) -> None:
    """On SQLite the trigger is dropped for the transaction that erases."""
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute(
        f"""create or replace function tollhouse_audit_log() returns trigger language plpgsql as $$
        begin
            {but}
            raise exception 'audit_log is append-only';
        end $$"""
    )
