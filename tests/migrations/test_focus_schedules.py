"""Schedules of FOCUS that were there before versions could be chosen keep 1.2."""

import json
from importlib import import_module
from typing import Any

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

from core.database import Database

_REVISION = import_module("migrations.versions.0006_focus_versions")


def test_schedules_that_exist_keep_their_version(database: Database) -> None:
    insert = sa.text(
        "insert into export_schedules (id, what, format, destination, options, every, next_at,"
        " created_at) values (:id, :what, 'csv', 'x', :options, 'day', '2026-01-01', '2026-01-01')"
    )
    with database.transaction() as session:
        for name in ("focus", "usage"):
            options = json.dumps({"delay_hours": 5})
            session.execute(insert, {"id": name, "what": name, "options": options})

        def _run(step: str) -> dict[str, Any]:
            context = MigrationContext.configure(session.connection())
            with Operations.context(context):
                getattr(_REVISION, step)()
            rows = session.execute(sa.text("select id, options from export_schedules"))
            return {
                row[0]: json.loads(row[1]) if isinstance(row[1], str) else row[1] for row in rows
            }

        assert _run("downgrade")["focus"] == {"delay_hours": 5}
        assert _run("upgrade") == {
            "focus": {"delay_hours": 5, "focus": {"version": "1.2", "dataset": "cost-and-usage"}},
            "usage": {"delay_hours": 5},
        }
