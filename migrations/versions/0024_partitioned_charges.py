"""Charges and engine receipts by month of the request id, as usage events are (PostgreSQL).

The table as it was becomes the default partition: no row is copied.
"""

import sqlalchemy as sa
from alembic import op

from billing import guards

revision = "0024_partitioned_charges"
down_revision = "0023_rating_shards"
branch_labels = None
depends_on = None
_KEYS = {"charges": "request_id", "engine_receipts": "request_id, engine_id"}
_INDEXES = {
    "charges": {
        "ix_charges_transaction": "transaction_id",
        "ix_charges_bill_period": "bill_period_id",
    },
    "engine_receipts": {},
}


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, key in _KEYS.items():
        default = f"{table}_default"
        op.execute(f"drop trigger append_only on {table}")
        op.execute(f"alter table {table} rename to {default}")
        for name in (f"pk_{table}", *_INDEXES[table]):
            op.execute(f"alter index {name} rename to {name}_default")
        op.execute(
            f"create table {table} (like {default} including defaults including constraints)"
            " partition by range (request_id)"
        )
        op.execute(f"alter table {table} add constraint pk_{table} primary key ({key})")
        for name, column in _INDEXES[table].items():
            op.execute(f"create index {name} on {table} ({column})")
        op.execute(f"alter table {table} attach partition {default} default")
        for statement in guards.append_only("postgresql", table):
            op.execute(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute(sa.text("set local tollhouse.maintenance = 'on'"))
    for table in _KEYS:
        default = f"{table}_default"
        op.execute(f"alter table {table} detach partition {default}")
        op.execute(f"insert into {default} select * from {table}")
        op.execute(f"drop table {table}")
        op.execute(f"alter table {default} rename to {table}")
        for name in (f"pk_{table}", *_INDEXES[table]):
            op.execute(f"alter index {name}_default rename to {name}")
        op.execute(guards.append_only("postgresql", table)[0])
