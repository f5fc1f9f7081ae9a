"""FOCUS schedules that exist keep version 1.2; voids are found by their time."""

import json

import sqlalchemy as sa
from alembic import op

from migrations.column_types import Json

revision = "0006_focus_versions"
down_revision = "0005_safety_keys"
branch_labels = None
depends_on = None
_SCHEDULES = sa.table(
    "export_schedules", sa.column("id"), sa.column("what"), sa.column("options", Json)
)
_VOID = sa.text("kind = 'void'")


def upgrade() -> None:
    bind = op.get_bind()
    focus = sa.select(_SCHEDULES.c.id, _SCHEDULES.c.options).where(_SCHEDULES.c.what == "focus")
    for schedule_id, options in bind.execute(focus).all():
        known = json.loads(options) if isinstance(options, str) else dict(options)
        known["focus"] = {"version": "1.2", "dataset": "cost-and-usage"}
        change = _SCHEDULES.update().where(_SCHEDULES.c.id == schedule_id)
        bind.execute(change.values(options=known))
    op.create_index(
        "ix_ledger_transactions_voids",
        "ledger_transactions",
        ["at"],
        postgresql_where=_VOID,
        sqlite_where=_VOID,
    )


def downgrade() -> None:
    op.drop_index("ix_ledger_transactions_voids", "ledger_transactions")
    bind = op.get_bind()
    focus = sa.select(_SCHEDULES.c.id, _SCHEDULES.c.options).where(_SCHEDULES.c.what == "focus")
    for schedule_id, options in bind.execute(focus).all():
        known = json.loads(options) if isinstance(options, str) else dict(options)
        kept = {name: value for name, value in known.items() if name == "delay_hours"}
        bind.execute(_SCHEDULES.update().where(_SCHEDULES.c.id == schedule_id).values(options=kept))
