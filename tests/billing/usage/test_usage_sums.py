"""What a bucket of usage says, to the last picounit; every amount is worked out by hand."""

from datetime import timedelta

import pytest

from billing.columns import PART_AMOUNTS
from billing.usage.usage_buckets import BucketQuery, Width, usage_buckets
from core.errors import BadRequest
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment

ACME = scope_of_operator("acme")
MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("width", list(Width))
def test_an_answer_is_the_same_counts_and_amounts_at_every_width(
    deployment: Deployment, width: Width
) -> None:
    deployment.record(deployment.event())
    deployment.rate()
    with deployment.database.read() as session:
        (bucket,) = usage_buckets(session, ACME, BucketQuery(START, START + MINUTE, width)).buckets
    (row,) = bucket.rows
    assert {name: count for name, count in row.counts.items() if count} == {
        "requests": 1,
        "input_tokens": 100,
        "cached_tokens": 20,
        "output_tokens": 50,
        "waived_tokens": 3,
    }
    # 80 at 0.15, 20 at 0.075 and 50 at 0.60 a million tokens; 0.60 a million is 600,000 a token.
    assert row.amounts == {
        "input_amount": 12_000_000,
        "cached_amount": 1_500_000,
        "output_amount": 30_000_000,
        "waived_amount": 0,
        "request_amount": 0,
        "adapter_amount": 0,
        "gpu_amount": 0,
        "moderation_amount": 0,
        "audio_amount": 0,
        "image_amount": 0,
        "character_amount": 0,
        **dict.fromkeys(PART_AMOUNTS, 0),
        "amount": 43_500_000,
    }


def test_pages_follow_each_other_to_the_end_that_is_asked(lite: Deployment) -> None:
    day = timedelta(days=1)
    found, start = [], START
    with lite.database.read() as session:
        for _ in range(3):
            page = usage_buckets(
                session, ACME, BucketQuery(start, START + 5 * day, Width.DAY, limit=2)
            )
            found.append([(each.start - START).days for each in page.buckets])
            if page.next_start is None:
                break
            start = page.next_start
    assert found == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("limit", [0, 181])
def test_a_page_of_days_has_one_to_180(lite: Deployment, limit: int) -> None:
    query = BucketQuery(START, START + timedelta(days=200), Width.DAY, limit=limit)
    with (
        lite.database.read() as session,
        pytest.raises(BadRequest, match="must be 1 to 180") as refused,
    ):
        usage_buckets(session, ACME, query)
    assert refused.value.param == "limit"


def test_a_span_ends_after_it_starts(lite: Deployment) -> None:
    with lite.database.read() as session, pytest.raises(BadRequest) as refused:
        usage_buckets(session, ACME, BucketQuery(START, START, Width.HOUR))
    assert refused.value.param == "end_time"
