"""Dead letters: tasks that exhausted their retries, with their arguments, and their replay."""

import json

from sqlalchemy import func, select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.dead_letter_models import DeadLetter
from dashboards.page_data import Form, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    require_confirmation,
    wants_csv,
)
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/dead-letters"
MAX_ROWS = 200
COLUMNS = [
    Column("at", "Failed", "moment"),
    Column("task", "Task", "code"),
    Column("arguments", "Arguments", "code"),
    Column("attempts", "Attempts", "whole"),
    Column("error", "Error"),
    Column("acts", "Replay", "acts"),
]


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps = deps_of(request)
    not_replayed = DeadLetter.replayed_at.is_(None)
    with deps.database.read() as session:
        count = session.scalar(select(func.count()).where(not_replayed)) or 0
        found = session.scalars(
            select(DeadLetter).where(not_replayed).order_by(DeadLetter.died_at).limit(MAX_ROWS)
        ).all()
        replayed = session.scalar(select(func.count()).where(~not_replayed)) or 0
    rows = [
        {
            "at": each.died_at,
            "task": each.task,
            "arguments": json.dumps(each.arguments, sort_keys=True) if each.arguments else "",
            "attempts": each.attempts,
            "error": each.error,
            "acts": [Form(PATH, "Replay", {"act": "replay", "id": str(each.id)})],
        }
        for each in found
    ]
    empty = "No dead letters: no task has exhausted its retries."
    table = Table(f"The oldest {len(rows)} of {count}", COLUMNS, rows, totals=False, empty=empty)
    if wants_csv(request):
        return table.csv("dead-letters")
    replay = Form(PATH, "Replay all", {"act": "replay"}, confirm="all", title="All dead letters")
    page_data = PageData(
        "Dead letters",
        "Fix the cause first. Tasks are idempotent, so a replay is safe.",
        tiles=[
            Tile("Waiting", grouped(count), state="bad" if count else "good"),
            Tile("Replayed", grouped(replayed)),
        ],
        tables=[table],
        forms=[replay] if rows else [],
    )
    return show(request, page_data)


def _replay(request: Request, form_fields: Fields) -> Response:
    """Replays one by its id, or all after confirmation."""
    operator_of(request, "operations", "write")
    number = form_fields.get("id", "")
    if not (number.isascii() and number.isdecimal() and len(number) < 19):
        require_confirmation(form_fields, "all")
    deps_of(request).backend.replay(
        [int(number)] if (number.isascii() and number.isdecimal() and len(number) < 19) else []
    )
    return redirect_with_notice(request, PATH, "replayed")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, replay=_replay), methods=["POST"]),
]
