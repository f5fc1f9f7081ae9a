"""The page Requests across the border of moved days: every request once, in order, by every column and in
both directions, as a plain list of the events says."""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from billing.archive.clickhouse import ClickHouseArchive
from billing.audit import reconcile
from billing.closing import moving
from billing.usage import service_rollups
from billing.usage.day_range import Range
from billing.usage.tables import Charge
from core.errors import DependencyDown
from core.events import UsageEvent
from core.tenants.scope import scope_of_operator
from dashboards import moved_requests, request_log
from dashboards.query import parse
from dashboards.query_filters import filters_of
from dashboards.request_log import LogQuery, cursor_of
from tests.billing.conftest import Deployment
from tests.contracts.conftest import START

ACME = scope_of_operator("acme", "test")
SPAN = Range(START.date(), (START + timedelta(days=20)).date())
SIZE = 4


def fill(made: Deployment, archive: ClickHouseArchive) -> list[UsageEvent]:
    """Usage of days of which the first are moved, some at one moment, and late usage of those."""
    made.tenant("globex")
    drawn = random.Random(7)
    late = [made.event(output_tokens=number, model="late's \\ one") for number in range(2)]
    events = list(late)
    for _ in range(6):
        for number in range(5):
            if number % 2:
                made.clock.advance(seconds=drawn.randrange(1, 4000))
            event = made.event(
                tenant_id="globex" if number == 4 else "acme",
                model=drawn.choice(("small", "large", "Ärger")),
                adapter=drawn.choice((None, "style")),
                output_tokens=drawn.randrange(3),
                status=drawn.choice((200, 200, 503)),
                first_token_ms=drawn.choice((None, 5, 9)),
                end_user=drawn.choice((None, "ada", "o'brien\\")),
            )
            events.append(event)
            made.record(event)
        made.clock.advance(days=1)
        made.clock.advance(seconds=-(made.clock.now() - START).total_seconds() % 86400)
    made.rate()
    service_rollups.sum_all(made.database, made.clock)
    made.clock.advance(hours=2)
    assert reconcile.close_days(made.database, made.clock)
    now = made.clock.now()
    assert len(moving.move_days(made.database, archive, now, 2)) >= 3
    assert moving.drop_moved(made.database, archive, now + moving.DROPPED_AFTER) > 10
    made.record(*late)
    return [event for event in events if event.tenant_id == "acme"]


def walk(made: Deployment, wanted: LogQuery) -> tuple[list[str], list[str]]:
    """The ids of all pages forwards, then of the pages back."""
    forth, back = list[list[str]](), list[list[str]]()
    query: dict[str, str] = {}
    with made.database.read() as session:
        while True:
            page = request_log.page_of(session, wanted, cursor_of(query, wanted.sort), SIZE)
            forth.append([event.request_id for event, _ in page.rows])
            if not page.later:
                break
            query = {"before": page.later}
        while page.earlier:
            query = {"after": page.earlier}
            page = request_log.page_of(session, wanted, cursor_of(query, wanted.sort), SIZE)
            back.insert(0, [event.request_id for event, _ in page.rows])
    return [name for each in forth for name in each], [name for each in back for name in each]


VALUES: dict[str, Callable[[UsageEvent], Any]] = {
    "at": lambda event: event.occurred_at,
    "name": lambda event: f"{event.model}:{event.adapter or ''}",
    "output_tokens": lambda event: event.output_tokens,
    "first_ms": lambda event: -1 if event.first_token_ms is None else event.first_token_ms,
}


def test_pages_have_every_request_once_in_order(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_archive
    events = fill(made, archive)
    for sort, value in VALUES.items():
        for falling in (True, False):
            wanted = LogQuery(ACME, SPAN, sort=sort, falling=falling)
            ordered = sorted(events, key=lambda e: (value(e), e.request_id), reverse=falling)
            ids = [event.request_id for event in ordered]
            forth, back = walk(made, wanted)
            assert forth == ids, (sort, falling)
            assert back == ids[: len(back)] and len(back) > len(ids) - 2 * SIZE
    queries: dict[str, Callable[[UsageEvent], bool]] = {
        "model:small": lambda e: e.model == "small",
        "-model:small": lambda e: e.model != "small",
        "status:5xx": lambda e: e.status >= 500,
        "output>1": lambda e: e.output_tokens > 1,
        "user:ada": lambda e: e.end_user == "ada",
    }
    for query, holds in queries.items():
        with made.database.read() as session:
            filters = filters_of(session, ACME, parse(query))
        forth, _ = walk(made, LogQuery(ACME, SPAN, filters.events))
        assert sorted(forth) == sorted(e.request_id for e in events if holds(e)), query

    first = events[2]
    with made.database.read() as session:
        found, charge = moved_requests.find(session, ACME, first.request_id)
        assert found is not None and isinstance(charge, Charge) and charge.amount > 0
        assert (found.model, found.end_user) == (first.model, first.end_user)
        other = scope_of_operator("globex", "test")
        assert moved_requests.find(session, other, first.request_id) == (None, None)

    def _down(*_given: Any) -> Any:
        raise DependencyDown("ClickHouse does not answer.")

    monkeypatch.setattr(archive._client, "rows", _down)
    lacks: list[str] = []
    with made.database.read() as session:
        here = session.execute(text("select count(*) from usage_events where tenant_id = 'acme'"))
        page = request_log.page_of(session, LogQuery(ACME, SPAN), None, 100, lacks)
        assert len(page.rows) == here.scalar_one() > 0
    assert lacks == ["ClickHouse does not answer."]
