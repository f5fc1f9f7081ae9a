"""Dead letters: tasks that exhausted their retries, with their arguments, and their replay."""

import json

from sqlalchemy import func, select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.queue_models import DeadLetter
from dashboards.pages.common import (
    Fields,
    acting,
    back_to,
    confirmed,
    house_of,
    operator_of,
    wants_csv,
)
from dashboards.scales import grouped
from dashboards.sheets import Form, Sheet, Tile, show
from dashboards.tables import Column, Table

PATH = "/operator/dead-letters"
MOST_ROWS = 200
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
    house = house_of(request)
    unplayed = DeadLetter.replayed_at.is_(None)
    with house.database.read() as session:
        count = session.scalar(select(func.count()).where(unplayed)) or 0
        found = session.scalars(
            select(DeadLetter).where(unplayed).order_by(DeadLetter.died_at).limit(MOST_ROWS)
        ).all()
        played = session.scalar(select(func.count()).where(~unplayed)) or 0
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
    sheet = Sheet(
        "Dead letters",
        "Fix the cause first. Tasks are idempotent, so a replay is safe.",
        tiles=[
            Tile("Waiting", grouped(count), state="bad" if count else "good"),
            Tile("Replayed", grouped(played)),
        ],
        tables=[table],
        forms=[replay] if rows else [],
    )
    return show(request, sheet)


def _replay(request: Request, given: Fields) -> Response:
    """Replays one by its id, or all after confirmation."""
    operator_of(request, "operations", "write")
    number = given.get("id", "")
    if not number.isdigit():
        confirmed(given, "all")
    house_of(request).gatehouse.replay([int(number)] if number.isdigit() else [])
    return back_to(request, PATH, "replayed")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, acting(replay=_replay), methods=["POST"]),
]
