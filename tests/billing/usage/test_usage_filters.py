"""Buckets of usage by every filter and group, from roll-ups and from events alike. Each event has a
power of two as its input tokens, so that a sum says which events are in it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import true

from billing.audit import reconcile
from billing.usage import rollups, service_rollups
from billing.usage.tables import UsageEventRow
from billing.usage.usage_buckets import BucketPage, BucketQuery, Width, floor_to, usage_buckets
from core.errors import BadRequest
from core.events import UsageKind
from core.tenants.scope import scope_of_key, scope_of_operator
from tests.billing.conftest import START, Deployment

ACME = scope_of_operator("acme")
MINUTE, DAY, INSTANT = timedelta(minutes=1), timedelta(days=1), timedelta(microseconds=1)
TOKENS = {"cached_tokens": 0, "output_tokens": 0, "waived_tokens": 0}
EVENTS: tuple[dict[str, Any], ...] = (
    {},
    {"project_id": "p2", "key_id": "k2"},
    {"model": "other", "adapter": "lora"},
    {"member_id": "mem_1", "batch_job": "batch_1"},
    {"kind": UsageKind.EMBEDDING, "end_user": "ann", "engine_id": "gpu"},
    {"occurred_at": START + DAY - INSTANT},
    {"occurred_at": START + DAY},
    {"tenant_id": "beta"},
    {"occurred_at": START - INSTANT},
)


@pytest.fixture
def filled(lite: Deployment) -> Deployment:
    lite.tenant("beta")
    lite.clock.advance(days=2)
    made = [
        lite.event(input_tokens=2**n, **({"occurred_at": START} | TOKENS | each))
        for n, each in enumerate(EVENTS)
    ]
    lite.record(*made)
    lite.rate()
    service_rollups.sum_all(lite.database, lite.clock)
    return lite


def read(made: Deployment, width: Width, *, scope: Any = ACME, **fields: Any) -> BucketPage:
    query = BucketQuery(START, START + DAY, width, limit=width.most, **fields)
    with made.database.read() as session:
        return usage_buckets(session, scope, query)


def total(page: BucketPage) -> int:
    return sum(row.counts["input_tokens"] for each in page.buckets for row in each.rows)


@pytest.mark.parametrize("width", list(Width))
def test_each_filter_keeps_its_own_at_every_width(filled: Deployment, width: Width) -> None:
    found = {}
    for name, fields in {
        "all": {},
        "project": {"project_ids": ("p2",)},
        "projects": {"project_ids": ("p2", "proj")},
        "key": {"key_ids": ("k2",)},
        "model": {"models": ("other",)},
        "member": {"member_ids": ("mem_1",)},
        "no member": {"member_ids": ("",)},
        "kind": {"kinds": ("embedding",)},
        "adapter": {"adapters": ("lora",)},
        "no adapter": {"adapters": ("",)},
        "batch": {"batch": True},
        "no batch": {"batch": False},
        "condition": {"conditions": (UsageEventRow.end_user == "ann",)},
        "two": {"key_ids": ("key",), "models": ("demo",)},
    }.items():
        page = read(filled, width, **fields)
        assert page.next_start is None
        found[name] = total(page)
    assert found == {
        "all": 0b111111,
        "project": 0b000010,
        "projects": 0b111111,
        "key": 0b000010,
        "model": 0b000100,
        "member": 0b001000,
        "no member": 0b110111,
        "kind": 0b010000,
        "adapter": 0b000100,
        "no adapter": 0b111011,
        "batch": 0b001000,
        "no batch": 0b110111,
        "condition": 0b010000,
        "two": 0b111001,
    }
    scope = scope_of_key("acme", "p2", "k2", "member")
    assert total(read(filled, width, scope=scope, project_ids=("proj",))) == 0b000010
    assert total(read(filled, width, scope=scope_of_operator("beta"))) == 2**7


def test_the_last_microsecond_of_a_day_is_of_that_day_however_it_is_summed(
    deployment: Deployment,
) -> None:
    """SQLite itself rounds the seconds since 1970 of a time to its milliseconds."""
    deployment.clock.advance(days=1)
    deployment.record(deployment.event(occurred_at=START + DAY - INSTANT))
    deployment.rate()
    service_rollups.sum_all(deployment.database, deployment.clock)
    with deployment.database.read() as session:
        assert rollups.recompute(session) == rollups.stored(session, rollups.HOURLY)
        assert reconcile.audit(session).differences == ()
    for fields in ({}, {"conditions": (true(),)}, {"group_by": ("end_user",)}):
        assert total(read(deployment, Width.DAY, **fields)) == 100


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("width", list(Width))
def test_each_dimension_divides_the_same_sums(
    filled: Deployment, width: Width, exact: bool
) -> None:
    """`exact` asks the events, whatever the roll-ups have."""
    conditions = (true(),) if exact else ()
    found: dict[str, dict[Any, int]] = {}
    dimensions = ("project_id", "key_id", "model", "kind", "currency", "batch", "end_user")
    for name in (*dimensions, "engine_id", "adapter", "member_id"):
        sums = found.setdefault(name, {})
        for bucket in read(filled, width, group_by=(name,), conditions=conditions).buckets:
            for row in bucket.rows:
                key = row.group[name]
                value = bool(key) if name == "batch" else key or ""
                sums[value] = sums.get(value, 0) + row.counts["input_tokens"]
    assert found == {
        "project_id": {"proj": 0b111101, "p2": 0b000010},
        "key_id": {"key": 0b111101, "k2": 0b000010},
        "model": {"demo": 0b111011, "other": 0b000100},
        "kind": {"generation": 0b101111, "embedding": 0b010000},
        "currency": {"USD": 0b111111},
        "batch": {False: 0b110111, True: 0b001000},
        "end_user": {"": 0b101111, "ann": 0b010000},
        "engine_id": {"": 0b101111, "gpu": 0b010000},
        "adapter": {"": 0b111011, "lora": 0b000100},
        "member_id": {"": 0b110111, "mem_1": 0b001000},
    }


def test_without_charges_there_are_only_the_counts_of_events(lite: Deployment) -> None:
    speech = lite.event(kind=UsageKind.SPEECH, units=9, adapter="lora", end_user="ann")
    lite.record(speech, lite.event(status=500, quantity=7), lite.event(status=499, quantity=3))
    gpu = {"kind": UsageKind.GPU_SECONDS, "quantity": 40, "input_tokens": 0, **TOKENS}
    lite.record(lite.event(**gpu), lite.event(**(gpu | {"kind": UsageKind.MODERATION})))
    lite.rate()
    service_rollups.sum_all(lite.database, lite.clock)
    counted = {"requests": 4, "input_tokens": 300, "cached_tokens": 60}
    counted |= {"output_tokens": 150, "waived_tokens": 9}
    charged = {"adapter_requests": 1, "gpu_seconds": 40, "moderation_calls": 40, "characters": 9}
    for fields in ({"conditions": (true(),)}, {"group_by": ("end_user",)}):
        for charges in (False, True):
            page = read(lite, Width.DAY, charges=charges, **fields)
            counts: dict[str, int] = {}
            amount = 0
            for row in page.buckets[0].rows:
                for name, value in row.counts.items():
                    counts[name] = counts.get(name, 0) + value
                amount += sum(row.amounts.values())
            shown = {name: value for name, value in counts.items() if value}
            assert shown == (counted | charged if charges else counted)
            assert (amount > 0) == charges


def test_usage_that_is_not_rated_yet_is_in_the_events_alone(lite: Deployment) -> None:
    lite.record(lite.event())
    assert total(read(lite, Width.MINUTE)) == total(read(lite, Width.DAY, batch=False)) == 100
    assert total(read(lite, Width.DAY)) == 0


def test_a_page_has_a_bucket_for_each_step_and_says_where_the_next_begins(
    lite: Deployment,
) -> None:
    usual = {Width.MINUTE: (60, MINUTE), Width.HOUR: (24, 60 * MINUTE), Width.DAY: (7, DAY)}
    with lite.database.read() as session:
        for width, (count, step) in usual.items():
            query = BucketQuery(START + MINUTE / 2, START + 400 * DAY, width)
            page = usage_buckets(session, ACME, query)
            assert [(each.start, each.end) for each in page.buckets] == [
                (START + n * step, START + (n + 1) * step) for n in range(count)
            ]
            assert page.next_start == START + count * step
            exact = BucketQuery(START, START + count * step, width)
            assert usage_buckets(session, ACME, exact).next_start is None


@pytest.mark.parametrize(
    ("width", "label", "most"),
    [(Width.MINUTE, "1m", 1440), (Width.HOUR, "1h", 168), (Width.DAY, "1d", 180)],
)
def test_a_query_is_refused_beyond_its_borders(
    lite: Deployment, width: Width, label: str, most: int
) -> None:
    def ask(start: datetime, **fields: Any) -> int:
        query = BucketQuery(start, START + 200 * DAY, width, **fields)
        with lite.database.read() as session:
            return len(usage_buckets(session, ACME, query).buckets)

    assert (ask(START, limit=1), ask(START, limit=most)) == (1, most)
    assert ask(START + 200 * DAY - INSTANT) == 1
    for fields, param in (
        ({"limit": 0}, "limit"),
        ({"limit": most + 1}, "limit"),
        ({"group_by": ("model", "weather")}, "group_by"),
    ):
        with pytest.raises(BadRequest) as refused:
            ask(START, **fields)
        assert refused.value.param == param
        assert param != "limit" or f"with {label} buckets it must be 1 to {most}" in (
            refused.value.message
        )
    with pytest.raises(BadRequest, match="end_time must be after start_time"):
        ask(START + 200 * DAY)


def test_a_moment_is_in_the_bucket_that_it_is_after_the_start_of() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    assert [floor_to(at, width).isoformat() for width in Width] == [
        "2026-01-02T03:04:00+00:00",
        "2026-01-02T03:00:00+00:00",
        "2026-01-02T00:00:00+00:00",
    ]
    assert [floor_to(floor_to(at, width), width) for width in Width] == [
        floor_to(at, width) for width in Width
    ]


def test_a_query_tells_what_it_needs() -> None:
    def query(**fields: Any) -> BucketQuery:
        return BucketQuery(**({"start": START, "end": START, "width": Width.DAY} | fields))

    plain = query(group_by=("end_user",))
    assert (plain.origin, plain.needs_events, plain.charges) == ("end_user", True, True)
    assert query(group_by=("engine_id",), project_ids=("p",)).origin == "engine_id"
    for fields in (
        *({"width": Width.HOUR}, {"batch": True}, {"conditions": (true(),)}, {"models": ("m",)}),
        *({"key_ids": ("k",)}, {"member_ids": ("m",)}, {"kinds": ("k",)}, {"adapters": ("a",)}),
        *({"group_by": ("end_user", "model")}, {"group_by": ("model",)}, {"group_by": ()}),
    ):
        assert query(**({"group_by": ("end_user",)} | fields)).origin == ""
    assert not query(group_by=("model", "member_id"), adapters=("a",)).needs_events
    for fields in ({"group_by": ("batch",)}, {"conditions": (true(),)}, {"batch": False}):
        assert query(**fields).needs_events
