"""Alembic's environment: runs migrations on the connection that `migrations.run` passes in."""

from alembic import context

from migrations.tables import metadata

connection = context.config.attributes["connection"]

context.configure(
    connection=connection,
    target_metadata=metadata,
    # SQLite cannot alter a table in place: batch mode copies it.
    render_as_batch=connection.dialect.name == "sqlite",
    compare_type=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
