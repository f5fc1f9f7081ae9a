"""What a refused request is told, and what is counted of it."""

import asyncio
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace
from sqlalchemy import select

from core import metrics
from core.clock import FakeClock
from core.counters import BucketState, Denial
from core.database import Database
from core.errors import NotFound
from core.tenants.models import RejectionRow
from gateway.admission import rejections
from gateway.admission.headers import retry_headers
from gateway.admission.rejections import (
    OverLimit,
    RejectionCounter,
    is_final,
    out_of_money_error,
    over_limit_error,
    too_large_error,
)

REQUESTS = BucketState("key:requests:60:key_a", 5, 60_000, 0, 60_000, 12_000)
TOKENS = BucketState("tenant:total_tokens:60:org_a", 900, 60_000, 3, 60_000, 40_500)
FREE = BucketState("tenant:requests:60:org_a", 90, 60_000, 80, 60_000, 99_000)
SLOT = "key:concurrent:key_a"


def denial(*keys: str, money: tuple[str, ...] = ()) -> Denial:
    return Denial((REQUESTS, TOKENS, FREE), (), keys, money)


def test_the_longest_wait_of_the_limits_that_refused_is_told() -> None:
    error = over_limit_error(denial(REQUESTS.key, TOKENS.key), 5.0)
    assert (error.retry_after_s, error.status) == (40.5, 429)
    assert error.message == (
        "This key may send 5 requests a minute, and this organisation may use 900 total tokens a "
        "minute."
    )
    assert error.next_step == "Retry in 41 s."
    assert (error.reason, error.buckets) == ("key:requests:60", (REQUESTS, TOKENS, FREE))


def test_a_slot_has_no_exact_wait() -> None:
    error = over_limit_error(denial(SLOT), 5.0)
    assert (error.retry_after_s, error.reason) == (5.0, "key:concurrent")
    assert error.next_step == "Wait until a running request ends."
    assert error.message == "This key has as many requests running as it may (key:concurrent)."
    both = over_limit_error(denial(SLOT, REQUESTS.key), 5.0)
    assert both.retry_after_s == 12.0


def test_the_limit_of_a_label_or_a_model_names_it() -> None:
    label = BucketState("label:requests:3600:team=a%3Ab", 1, 3_600_000, 0, 1, 1_500)
    model = BucketState("model:input_tokens:86400:tiny", 2_000, 86_400_000, 0, 1, 1_500)
    found = Denial((label, model), (), (label.key, model.key))
    assert str(over_limit_error(found, 0.0)) == (
        "The label team=a:b may send 1 request an hour, and this organisation may use 2,000 input "
        "tokens a day to this model. Retry in 2 s."
    )


def test_a_request_larger_than_a_whole_limit_is_told_its_size() -> None:
    never = replace(TOKENS, wait_ms=None)
    found = Denial((replace(FREE, wait_ms=None), REQUESTS, never), (), (REQUESTS.key, never.key))
    error = too_large_error(found)
    assert error.message == (
        "The request exceeds the whole limit of the organisation's total tokens per minute "
        "(tenant:total_tokens:60), 900."
    )
    assert (error.code, error.reason) == ("request_too_large_for_limit", "tenant:total_tokens:60")
    assert error.buckets == found.buckets


def test_only_a_lack_of_money_is_final() -> None:
    error = out_of_money_error(denial(money=("budget",)))
    assert is_final(error) and error.buckets == (REQUESTS, TOKENS, FREE)
    assert not is_final(over_limit_error(denial(SLOT), 1.0))


@pytest.mark.parametrize(
    ("seconds", "headers"),
    [
        (None, {}),
        (0.0, {"retry-after": "1", "retry-after-ms": "1"}),
        (0.0101, {"retry-after": "1", "retry-after-ms": "11"}),
        (1.0, {"retry-after": "1", "retry-after-ms": "1000"}),
        (1.0001, {"retry-after": "2", "retry-after-ms": "1001"}),
        (40.5, {"retry-after": "41", "retry-after-ms": "40500"}),
    ],
)
def test_waits_are_rounded_up(seconds: float | None, headers: dict[str, str]) -> None:
    assert retry_headers(seconds) == headers


def test_refusals_and_waits_are_counted_by_tenant_and_hour(sqlite_database: Database) -> None:
    clock = FakeClock(datetime(2026, 3, 1, 12, 34, 56, 789, tzinfo=UTC))
    counter = RejectionCounter(sqlite_database, clock)
    labelled = metrics.rejections.labels("key:requests:60")
    before = labelled._value.get()
    error = over_limit_error(denial(REQUESTS.key), 1.0)
    for tenant in ("org_a", "org_a", None):
        counter.count(error, tenant)
    counter.count(OverLimit("no reason", next_step="", code="queue_full"), "org_a")
    counter.count(NotFound("not by a limit", next_step=""), "org_a")
    counter.waited("org_a", "queue", 30)
    counter.waited("org_a", "queue", 12)
    assert labelled._value.get() - before == 3
    counter.flush()
    counter.flush()
    hour = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert stored(sqlite_database) == [
        ("org_a", hour, "key:requests:60", 2, 0, 0),
        ("org_a", hour, "queue", 0, 2, 42),
        ("org_a", hour, "queue_full", 1, 0, 0),
    ]


def test_counts_that_cannot_be_written_are_kept_for_the_next_time(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = RejectionCounter(sqlite_database, FakeClock(datetime(2026, 3, 1, tzinfo=UTC)))
    counter.waited("org_a", "queue", 30)
    with monkeypatch.context() as patched:
        patched.setattr(sqlite_database, "transaction", _fail(counter))
        counter.flush()
    counter.waited("org_a", "queue", 5)
    counter.flush()
    assert [row[2:] for row in stored(sqlite_database)] == [("queue", 0, 3, 36)]


async def test_the_counts_are_written_every_few_seconds(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejections, "FLUSH_S", 0.0)
    counter = RejectionCounter(sqlite_database, FakeClock(datetime(2026, 3, 1, tzinfo=UTC)))
    flushed = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(counter, "flush", lambda: loop.call_soon_threadsafe(flushed.set))
    task = asyncio.create_task(counter.run())
    assert await asyncio.wait_for(flushed.wait(), 30)
    assert not task.done(), "it goes on"
    task.cancel()


def _fail(counter: RejectionCounter):  # type: ignore[no-untyped-def]
    def _transaction() -> None:
        counter.waited("org_a", "queue", 1)  # meanwhile, in the event loop
        raise OSError("the database is away")

    return _transaction


def stored(database: Database) -> list[tuple[object, ...]]:
    with database.read() as session:
        rows = session.scalars(select(RejectionRow).order_by(RejectionRow.reason)).all()
        return [
            (row.tenant_id, row.at, row.reason, row.rejected, row.queued, row.queued_ms)
            for row in rows
        ]
