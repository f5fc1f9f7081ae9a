"""The query language: what is written is what is found, compared with a reading of the rows in Python."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from billing.pricing import prices
from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups, usage
from billing.usage.day_range import Range
from billing.usage.tables import UsageEventRow
from billing.usage.usage_buckets import BucketQuery, Width, usage_buckets
from core.clock import FakeClock
from core.database import Database
from core.errors import BadRequest
from core.events import UsageEvent
from core.tenants import keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import TenantScope, scope_of_operator
from dashboards import request_log
from dashboards.explorer import Explored, bar_of
from dashboards.query import Term, parse
from dashboards.query_filters import filters_of
from dashboards.request_log import LogQuery
from tests.dashboards.usage_events import usage_event

TODAY = date(2026, 3, 5)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("", ()),
        ("model:tiny", (Term("model", ":", ("tiny",)),)),
        ("model:a,b -status:5xx", (Term("model", ":", ("a", "b")),
                                   Term("status", ":", ("5xx",), True))),
        ('key:"night reports"', (Term("key", ":", ("night reports",)),)),
        ("cost>=0.01 time<500", (Term("cost", ">=", ("0.01",)), Term("time", "<", ("500",)))),
        ("req_01abc", (Term("id", ":", ("req_01abc",)),)),
        ("adapter:acme/sql:v2", (Term("adapter", ":", ("acme/sql:v2",)),)),
    ],
)  # fmt: skip
def test_a_query_is_read_and_written(text: str, terms: tuple[Term, ...]) -> None:
    query = parse(text)
    assert query.terms == terms
    assert parse(str(query)) == query


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tiny", "'tiny' does not say which field it filters. Write model:tiny"),
        ("modl:tiny", "There is no field 'modl'"),
        ("model>3", "model is not a number"),
        ("cost>cheap", "cost is 'cheap'"),
        ("cost>nan", "cost is 'nan'"),
        ("cost>1e300", "cost is '1e300'"),
        ("status:600", "status is '600'"),
        ('key:"night', "close quotation marks"),
        ("model:", "'model:' does not say which field it filters"),
        ("model:,", "model has no value"),
        ("since:soon", "since is 'soon'"),
        ("since:2026-03-04 until:2026-03-01", "after its end"),
        ("since:999d", "the maximum is 180"),
        ("since:7d since:8d", "Give since once"),
        ("model:a\x00b", "control characters"),
        ("x" * 500, "500 characters"),
    ],
)
def test_a_wrong_query_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(BadRequest) as told:
        parse(text).span(TODAY, 7)
    assert said in str(told.value) and told.value.param == "q"


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        query = parse(text)
        assert parse(str(query)) == query
        query.span(TODAY, 7)
    except BadRequest:
        pass


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("", date(2026, 2, 27), TODAY),
        ("since:today", TODAY, TODAY),
        ("since:7d", date(2026, 2, 27), TODAY),
        ("since:month", date(2026, 3, 1), TODAY),
        ("since:lastmonth", date(2026, 2, 1), date(2026, 2, 28)),
        ("since:2026-02-03 until:2026-02-05", date(2026, 2, 3), date(2026, 2, 5)),
        ("until:2026-02-05", date(2026, 1, 30), date(2026, 2, 5)),
    ],
)
def test_a_period_is_days(text: str, first: date, last: date) -> None:
    assert parse(text).span(TODAY, 7) == Range(first, last)


NOON = datetime(2025, 12, 5, 12, tzinfo=UTC)
Row = tuple[UsageEventRow, int]


@pytest.fixture
def scope(database: Database, clock: FakeClock) -> TenantScope:
    clock.set(NOON + timedelta(minutes=10))
    with database.transaction() as session:
        own = scope_of_operator(create_tenant(session, clock, name="queried").id)
        project = create_project(session, own, clock, name="main").id
        made = [
            keys.issue(session, own, clock, project_id=project, name=name).id
            for name in ("checkout", "night reports")
        ]
        price = prices.ensure_default_prices(session, clock, "tiny").id
        events = [_event(own, number, project, made, price) for number in range(40)]
        usage.record(session, events, clock)
    rate_all(database, clock)
    return own


def _event(
    scope: TenantScope, number: int, project: str, made: list[str], price: str
) -> UsageEvent:
    at = NOON + timedelta(seconds=number)
    return usage_event(
        at,
        price,
        tenant_id=scope.tenant_id,
        project_id=project,
        key_id=made[number % 2],
        adapter=(None, "sql", "tone")[number % 3],
        input_tokens=1000 * number,
        output_tokens=number,
        status=(200, 200, 200, 404, 503)[number % 5],
        duration_ms=100 * number,
        first_token_ms=None if number % 4 == 0 else 10 * number,
        end_user=(None, "ann", "bob")[number % 3],
    )


FOUND: list[tuple[str, Callable[[Any, int], bool]]] = [
    ("model:tiny", lambda e, c: True),
    ("model:other", lambda e, c: False),
    ("adapter:none", lambda e, c: e.adapter is None),
    ("-adapter:sql", lambda e, c: e.adapter != "sql"),
    ("adapter:sql,tone status:5xx", lambda e, c: e.adapter is not None and e.status >= 500),
    ("status:error", lambda e, c: e.status >= 400),
    ("status:4xx", lambda e, c: e.status == 404),
    ("-status:error", lambda e, c: e.status == 200),
    ("user:ann", lambda e, c: e.end_user == "ann"),
    ("-user:ann", lambda e, c: e.end_user != "ann"),
    ("time>=500 time<1000", lambda e, c: 500 <= e.duration_ms < 1000),
    ("first>100", lambda e, c: e.first_token_ms is not None and e.first_token_ms > 100),
    ("-first>100", lambda e, c: not (e.first_token_ms or 0) > 100),
    ("cost>0.001", lambda e, c: c > 10**9),
    ("cost<=0.001", lambda e, c: c <= 10**9),
    ("input:5000", lambda e, c: e.input_tokens == 5000),
]


def test_a_query_finds_what_it_says(database: Database, scope: TenantScope) -> None:
    day = Range(NOON.date(), NOON.date())
    every = list(request_log.all_rows(database, LogQuery(scope, day)))
    assert len(every) == 40
    for text, holds in FOUND:
        with database.read() as session:
            filters = filters_of(session, scope, parse(text))
        found = list(request_log.all_rows(database, LogQuery(scope, day, filters.events)))
        wanted = [event.request_id for event, amount in every if holds(event, int(amount or 0))]
        assert [event.request_id for event, _ in found] == wanted, text


def test_a_key_is_named_and_another_tenant_s_is_not_found(
    database: Database, clock: FakeClock, scope: TenantScope
) -> None:
    day = Range(NOON.date(), NOON.date())
    with database.transaction() as session:
        filters = filters_of(session, scope, parse('key:"night reports"'))
        assert filters.rolled_up is not None
        found = list(request_log.all_rows(database, LogQuery(scope, day, filters.events)))
        assert len(found) == 20 and {e.key_id for e, _ in found} == set(filters.rolled_up["key_id"])
        other = scope_of_operator(create_tenant(session, clock, name="other").id)
        with pytest.raises(BadRequest, match="There is no key 'checkout'"):
            filters_of(session, other, parse("key:checkout"))


def test_filters_have_the_counts_of_the_requests_in_the_range(
    database: Database, clock: FakeClock, scope: TenantScope
) -> None:
    service_rollups.sum_all(database, clock)
    day = Range(NOON.date(), NOON.date())
    every = [event for event, _ in request_log.all_rows(database, LogQuery(scope, day))]
    request = Request(
        {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    )
    explored = Explored(parse("adapter:sql"), day)
    with database.read() as session:
        facets = dict(bar_of(request, session, scope, explored, NOON.date()).facets)
    adapters = Counter(event.adapter or "none" for event in every)
    assert {link.words: link.count for link in facets["Adapter"]} == adapters
    assert [link.words for link in facets["Adapter"] if link.on] == ["sql"]
    assert sorted(link.count or 0 for link in facets["Key"]) == sorted(
        Counter(event.key_id for event in every).values()
    )
    assert "Model" not in facets, "one value filters nothing"
    outcomes = Counter(min(event.status // 100, 5) for event in every)
    shown = {link.words: link.count for link in facets["Status"]}
    assert shown == {"Answered": outcomes[2], "Rejected": outcomes[4], "Server errors": outcomes[5]}


def test_without_charges_the_counts_of_events_are_the_same(
    database: Database, scope: TenantScope
) -> None:
    day = Range(NOON.date(), NOON.date())
    whole = BucketQuery(day.start, day.end, Width.DAY, ("end_user", "engine_id"))
    with database.read() as session:
        (rated,), (counted,) = (
            usage_buckets(session, scope, query).buckets
            for query in (whole, replace(whole, charges=False))
        )
    assert sum(row.amounts["amount"] for row in rated.rows) > 0
    assert all(set(row.amounts.values()) == {0} for row in counted.rows)
    kept = ("requests", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
    found = [
        [(row.group, [row.counts[name] for name in kept]) for row in each.rows]
        for each in (rated, counted)
    ]
    assert found[0] == found[1] and len(found[0]) == 3
