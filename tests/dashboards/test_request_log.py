"""The list of requests: every row once, in order, whichever way it is paged, also at one same moment."""

from datetime import UTC, datetime, timedelta

import pytest

from billing import prices, usage
from core.clock import FakeClock
from core.database import Database
from core.errors import BadRequest
from core.events import UsageEvent
from core.tenants.organisations import create_tenant
from core.tenants.scope import TenantScope, scope_of_operator
from dashboards import request_log
from dashboards.filters import Range
from dashboards.query import parse
from dashboards.query_filters import filters_of
from dashboards.request_log import LogPage, LogQuery, cursor_of
from tests.dashboards.usage_events import usage_event

NOON = datetime(2025, 12, 5, 12, tzinfo=UTC)
DAY = Range(NOON.date(), NOON.date())


def _event(scope: TenantScope, number: int, at: datetime, status: int, price: str) -> UsageEvent:
    changes = {"request_id": f"req_{number:04d}", "tenant_id": scope.tenant_id, "status": status}
    return usage_event(at, price, **changes)


@pytest.fixture
def scope(database: Database, clock: FakeClock) -> TenantScope:
    """25 requests: ten at one moment, the rest a second apart; each fifth is wrong."""
    with database.transaction() as session:
        own, other = (
            scope_of_operator(create_tenant(session, clock, name=name).id)
            for name in ("own", "other")
        )
        price = prices.ensure_default_prices(session, clock, "tiny").id
        moments = [NOON] * 10 + [NOON + timedelta(seconds=n) for n in range(15)]
        events = [
            _event(own, number, at, (200, 200, 200, 200, 503)[number % 5], price)
            for number, at in enumerate(moments)
        ]
        events.append(_event(other, 900, NOON, 200, price))
        events.append(_event(own, 901, NOON - timedelta(days=1), 200, price))
        usage.record(session, events, clock)
    return own


def _page(database: Database, wanted: LogQuery, **query: str) -> LogPage:
    with database.read() as session:
        return request_log.page_of(session, wanted, cursor_of(query), 10)


def _ids(found: LogPage) -> list[str]:
    return [event.request_id for event, _ in found.rows]


def _wanted_ids() -> list[str]:
    at = [0] * 10 + list(range(15))
    return [f"req_{n:04d}" for n in sorted(range(25), key=lambda n: (at[n], n), reverse=True)]


def test_it_is_walked_to_the_end_and_back(database: Database, scope: TenantScope) -> None:
    wanted = LogQuery(scope, DAY)
    pages = [_page(database, wanted)]
    assert not pages[0].newer
    while pages[-1].older:
        pages.append(_page(database, wanted, before=pages[-1].older))
    assert [len(each.rows) for each in pages] == [10, 10, 5]
    assert [each for one in pages for each in _ids(one)] == _wanted_ids()
    back = _page(database, wanted, after=pages[2].newer)
    assert _ids(back) == _ids(pages[1]) and back.newer and back.older
    first = _page(database, wanted, after=back.newer)
    assert _ids(first) == _ids(pages[0]) and not first.newer


def test_the_file_has_all_that_the_filter_lets_through(
    database: Database, scope: TenantScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "_EXPORTED", 4)
    every = [event.request_id for event, _ in request_log.all_rows(database, LogQuery(scope, DAY))]
    assert every == _wanted_ids()
    with database.read() as session:
        failed, refused = (
            filters_of(session, scope, parse(text)).events for text in ("status:5xx", "status:4xx")
        )
    found = list(request_log.all_rows(database, LogQuery(scope, DAY, failed)))
    assert len(found) == 5 and all(event.status == 503 for event, _ in found)
    assert list(request_log.all_rows(database, LogQuery(scope, DAY, refused))) == []


@pytest.mark.parametrize("text", ["soon~req_1", "2026-03-05T12:00:00+00:00", "2026-03-05~req_1"])
def test_a_place_that_is_none_is_told(text: str) -> None:
    with pytest.raises(BadRequest):
        cursor_of({"before": text})
