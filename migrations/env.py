"""Alembic's entry: runs the versions over the connection that `migrations.run` hands in."""

from alembic import context

from migrations.tables import metadata

connection = context.config.attributes["connection"]

context.configure(
    connection=connection,
    target_metadata=metadata,
    # SQLite cannot alter a table in place: alembic copies it instead.
    render_as_batch=connection.dialect.name == "sqlite",
    compare_type=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
