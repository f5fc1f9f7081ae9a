"""The list of requests: every row once, in order, whichever way it is paged, also at one same moment."""

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from billing.pricing import prices
from billing.usage import usage
from billing.usage.day_range import Range
from core.clock import FakeClock
from core.database import Database
from core.errors import BadRequest
from core.events import UsageEvent
from core.tenants.organisations import create_tenant
from core.tenants.scope import TenantScope, scope_of_operator
from dashboards import request_log
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
        return request_log.page_of(session, wanted, cursor_of(query, wanted.sort), 10)


def _ids(found: LogPage) -> list[str]:
    return [event.request_id for event, _ in found.rows]


def _wanted_ids() -> list[str]:
    at = [0] * 10 + list(range(15))
    return [f"req_{n:04d}" for n in sorted(range(25), key=lambda n: (at[n], n), reverse=True)]


def test_it_is_walked_to_the_end_and_back(database: Database, scope: TenantScope) -> None:
    wanted = LogQuery(scope, DAY)
    pages = [_page(database, wanted)]
    assert not pages[0].earlier
    while pages[-1].later:
        pages.append(_page(database, wanted, before=pages[-1].later))
    assert [len(each.rows) for each in pages] == [10, 10, 5]
    assert [each for one in pages for each in _ids(one)] == _wanted_ids()
    back = _page(database, wanted, after=pages[2].earlier)
    assert _ids(back) == _ids(pages[1]) and back.earlier and back.later
    first = _page(database, wanted, after=back.earlier)
    assert _ids(first) == _ids(pages[0]) and not first.earlier


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


def _varied(scope: TenantScope, price: str) -> list[UsageEvent]:
    """Each value stands several times, and the first token is missing in each third."""
    return [
        usage_event(
            NOON + timedelta(seconds=number),
            price,
            request_id=f"req_{number:04d}",
            tenant_id=scope.tenant_id,
            model=("tiny", "large")[number % 2],
            adapter=("law", None, "tax")[number % 3],
            status=(200, 429, 503)[number % 3],
            finish_reason=("stop", "length")[number % 2],
            input_tokens=number * 7 % 5 + 10,
            cached_tokens=number * 7 % 5,
            output_tokens=number * 3 % 7,
            first_token_ms=None if number % 3 == 0 else number * 11 % 13,
            duration_ms=number * 5 % 11,
        )
        for number in range(37)
    ]


def _value(event: UsageEvent, sort: str) -> object:
    """As the page says it is sorted, in plain Python."""
    plain: dict[str, object] = {
        "at": event.occurred_at,
        "request": event.request_id,
        "name": f"{event.model}:{event.adapter or ''}",
        "end": event.finish_reason,
        "first_ms": -1 if event.first_token_ms is None else event.first_token_ms,
        "amount": 0,
    }
    return plain[sort] if sort in plain else getattr(event, sort)


def test_every_column_sorts_and_its_pages_are_walked_both_ways(
    database: Database, clock: FakeClock
) -> None:
    with database.transaction() as session:
        own = scope_of_operator(create_tenant(session, clock, name="own").id)
        price = prices.ensure_default_prices(session, clock, "tiny").id
        events = _varied(own, price)
        usage.record(session, events, clock)
    for sort, falling in product(request_log.SORTS, (True, False)):
        wanted = LogQuery(own, DAY, sort=sort, falling=falling)
        ranked = sorted(events, key=lambda event: event.request_id, reverse=falling)
        ranked.sort(key=lambda event, by=sort: _value(event, by), reverse=falling)  # type: ignore[misc]
        pages = [_page(database, wanted)]
        while pages[-1].later:
            pages.append(_page(database, wanted, before=pages[-1].later))
        listed = [name for each in pages for name in _ids(each)]
        assert [sort_of(events, name, sort) for name in listed] == [
            sort_of(events, each.request_id, sort) for each in ranked
        ], (sort, falling)
        assert sorted(listed) == sorted(each.request_id for each in events), (sort, falling)
        back = _page(database, wanted, after=pages[-1].earlier)
        assert _ids(back) == _ids(pages[-2]), (sort, falling)
        assert _ids(_page(database, wanted, after=back.earlier)) == _ids(pages[-3]), (sort, falling)
        whole = [event.request_id for event, _ in request_log.all_rows(database, wanted)]
        assert whole == listed, (sort, falling)


def sort_of(events: list[UsageEvent], name: str, sort: str) -> object:
    return _value(next(each for each in events if each.request_id == name), sort)


def test_pages_agree_while_requests_arrive(
    database: Database, clock: FakeClock, scope: TenantScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "SORTED", 20)
    wanted = LogQuery(scope, DAY, sort="duration_ms")
    first = _page(database, wanted)
    with database.transaction() as session:
        price = prices.ensure_default_prices(session, clock, "tiny").id
        late = NOON + timedelta(hours=1)
        more = [_event(scope, 500 + n, late, 200, price) for n in range(30)]
        usage.record(session, more, clock)
    second = _page(database, wanted, before=first.later)
    assert sorted([*_ids(first), *_ids(second)]) == sorted(_wanted_ids()[:20])
    assert not second.later
    assert _ids(_page(database, wanted))[0] >= "req_0500"


@pytest.mark.parametrize("text", ["5~req_1", "x~req_1~2025-12-05T12:00:00+00:00", "5~req_1~soon"])
def test_a_place_of_another_order_is_told(text: str) -> None:
    with pytest.raises(BadRequest):
        cursor_of({"before": text}, "duration_ms")
