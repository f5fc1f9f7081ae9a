"""Renames tables and columns to standard terms. Views keep the old names readable."""

from alembic import op

revision = "0012_standard_table_names"
down_revision = "0011_receipts_by_engine"
branch_labels = None
depends_on = None

# old name -> (new name, {old column: new column})
_TABLES = {
    "kept_answers": ("idempotency_records", {"answer": "response"}),
    "limit_refusals": (
        "limit_rejections",
        {"refused": "rejected", "waited": "queued", "waited_ms": "queued_ms"},
    ),
    "file_pieces": ("file_chunks", {}),
}
_INDEXES = {
    "kept_answers": {"tenant_id": ["tenant_id", "claimed_at"], "expires_at": ["expires_at"]},
    "limit_refusals": {},
    "file_pieces": {},
}


def upgrade() -> None:
    for old, (new, columns) in _TABLES.items():
        _rename(old, new, columns, _INDEXES[old])
        named = ", ".join(f"{new_name} as {name}" for name, new_name in columns.items())
        same = ", ".join(name for name in _columns(new) if name not in columns.values())
        op.execute(
            f"create view {old} as select {', '.join(filter(None, (same, named)))} from {new}"
        )


def downgrade() -> None:
    for old, (new, columns) in _TABLES.items():
        op.execute(f"drop view {old}")
        _rename(new, old, {name: was for was, name in columns.items()}, _INDEXES[old])


def _columns(table: str) -> list[str]:
    rows = op.get_bind().exec_driver_sql(f"select * from {table} where false")
    return list(rows.keys())


def _rename(table: str, to: str, columns: dict[str, str], indexes: dict[str, list[str]]) -> None:
    for name in indexes:
        op.drop_index(f"ix_{table}_{name}", table_name=table)
    op.rename_table(table, to)
    for name, new_name in columns.items():
        op.execute(f"alter table {to} rename column {name} to {new_name}")
    for name, indexed in indexes.items():
        op.create_index(f"ix_{to}_{name}", to, indexed)
    if op.get_context().dialect.name == "postgresql":  # SQLite's constraints need no name
        op.execute(f"alter table {to} rename constraint pk_{table} to pk_{to}")
        if "file" in table:
            op.execute(f"alter table {to} rename constraint fk_{table}_file_id to fk_{to}_file_id")
