"""The service roll-ups: exact sums, once a batch, with honest percentiles."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from billing.usage import service_rollups
from billing.usage.service_rollups import percentile
from billing.usage.tables import (
    FIRST_COLUMNS,
    FIRST_TOKEN_MS,
    SPEED_COLUMNS,
    TOKENS_A_SECOND,
    Charge,
    DailyService,
    HourlyService,
)
from billing.usage.usage_buckets import BucketQuery, Width, usage_buckets
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment


def totals(deployment: Deployment, table: type) -> dict[str, int]:
    with deployment.database.read() as session:
        sums = [func.coalesce(func.sum(getattr(table, name)), 0) for name in service_rollups.SUMS]
        row = session.execute(select(*sums)).one()
    return {name: int(value) for name, value in zip(service_rollups.SUMS, row, strict=True)}


def test_every_charged_event_is_summed_once(deployment: Deployment) -> None:
    deployment.record(
        *(
            deployment.event(member_id="mem_a", first_token_ms=80, duration_ms=1080)
            for _ in range(5)
        )
    )
    deployment.record(*(deployment.event(status=503, first_token_ms=None) for _ in range(2)))
    assert (
        service_rollups.sum_all(deployment.database, deployment.clock) == 0
    )  # nothing is rated yet
    deployment.rate()
    assert service_rollups.sum_all(deployment.database, deployment.clock) == 2
    assert service_rollups.sum_all(deployment.database, deployment.clock) == 0
    with deployment.database.read() as session:
        charged = session.scalar(select(func.sum(Charge.amount)))
    for table in (HourlyService, DailyService):
        found = totals(deployment, table)
        assert found["answers"] == 7 and found["failed"] == 2
        assert found["amount"] == charged
        assert found["first_1"] == 5 and sum(found[name] for name in FIRST_COLUMNS) == 5
        assert found["speed_4"] == 5  # 49 tokens in a second
        assert sum(found[name] for name in SPEED_COLUMNS) == 5


def test_a_rebuild_finds_the_same(deployment: Deployment) -> None:
    for day in range(3):
        at = START + timedelta(days=day, hours=5)
        deployment.record(*(deployment.event(occurred_at=at, finished_at=at) for _ in range(3)))
    deployment.rate()
    service_rollups.sum_all(deployment.database, deployment.clock)
    before = totals(deployment, HourlyService), totals(deployment, DailyService)
    with deployment.database.transaction() as session:
        service_rollups.rebuild(session, deployment.clock)
    assert (totals(deployment, HourlyService), totals(deployment, DailyService)) == before


@pytest.mark.parametrize("width", [Width.HOUR, Width.DAY])
def test_buckets_by_member_are_those_of_the_whole(deployment: Deployment, width: Width) -> None:
    deployment.record(
        *(deployment.event(member_id=who) for who in ("mem_a", "mem_a", "mem_b", None))
    )
    deployment.rate()
    service_rollups.sum_all(deployment.database, deployment.clock)
    scope = scope_of_operator("acme")
    span = (START, START + timedelta(days=2), width)
    with deployment.database.read() as session:
        by_member = usage_buckets(session, scope, BucketQuery(*span, ("member_id",)))
        by_model = usage_buckets(session, scope, BucketQuery(*span, ("model",)))
    rows = [row for bucket in by_member.buckets for row in bucket.rows]
    assert {row.group["member_id"]: row.counts["requests"] for row in rows} == {
        "mem_a": 2,
        "mem_b": 1,
        "": 1,
    }
    whole = [row for bucket in by_model.buckets for row in bucket.rows]
    assert sum(r.amounts["amount"] for r in rows) == sum(r.amounts["amount"] for r in whole)


@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99])
)
def test_a_percentile_lies_in_the_class_of_the_true_one(values: list[int], share: float) -> None:
    counts = [0] * (len(FIRST_TOKEN_MS) + 1)
    for value in values:
        counts[sum(value > bound for bound in FIRST_TOKEN_MS)] += 1
    found = percentile(counts, FIRST_TOKEN_MS, share)
    assert found is not None
    ranked = sorted(values)
    true = ranked[max(0, -(-round(share * 1000) * len(ranked) // 1000) - 1)]
    low = max((b for b in (0, *FIRST_TOKEN_MS) if b < true), default=0)
    high = next((b for b in FIRST_TOKEN_MS if b >= true), FIRST_TOKEN_MS[-1])
    assert low <= found <= high


def test_no_answer_has_no_percentile() -> None:
    assert percentile([0, 0], [5], 0.5) is None


def test_what_is_stored_keeps_its_meaning() -> None:
    """Counts are stored by the number of their bucket, so its bounds never change."""
    assert FIRST_TOKEN_MS == (50, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10_000)
    assert TOKENS_A_SECOND == (5, 10, 20, 30, 50, 75, 100, 150, 200, 400)
