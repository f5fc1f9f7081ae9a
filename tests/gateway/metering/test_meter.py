"""What a meter writes for each ending: one event, counted and acknowledged by the rules."""

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import replace as replaced
from pathlib import Path

import pytest
from msgspec.structs import replace

from core import metrics
from core.clock import FakeClock
from core.events import Components, CountedBy, EngineCount, OpenedRequest, SettledBy, UsageEvent
from core.tallies import fold_all
from gateway.engines.upstream_usage import UpstreamReceipt
from gateway.metering.meter import (
    Counts,
    Ending,
    Meter,
    MeterServices,
    blocked_ending,
    counted_by,
    counts_of,
    refused_ending,
)
from gateway.metering.recovery import event_of_receipt
from gateway.metering.spool import Spool, SpoolFile
from gateway.metering.spool import read_outbox as read
from gateway.metering.spool_records import decode_outbox
from gateway.metering.spool_statements import Statement, insert_receipt
from tests.gateway.metering.spool_rows import NOW, opened
from tests.gateway.metering.test_spool import receipt

LEFT = Ending(3, 5, "abort", 499, prompt_done=True)
ANSWERED = Ending(6, 7, "stop", 200, prompt_done=True, counted_by=CountedBy.ENGINE)


class Metering:
    def __init__(self, path: Path) -> None:
        self.clock = FakeClock(NOW)
        self.file = SpoolFile(path)
        self.spool = Spool(self.file)
        self.acknowledged: list[tuple[str, ...]] = []
        self.services = MeterServices(
            self.spool, self.clock, lambda *ids: self.acknowledged.append(ids)
        )

    def meter(self, record: OpenedRequest | None = None) -> Meter:
        return Meter(self.services, record or opened("req_1"))

    def events(self) -> list[UsageEvent]:
        self.spool.flush()
        return decode_outbox(read(self.file.connection, 100)).usage


@pytest.fixture
def metering(tmp_path: Path) -> Iterator[Metering]:
    made = Metering(tmp_path / "a.db")
    yield made
    made.file.close()


def counts(event: UsageEvent) -> tuple[int, int, int, int]:
    return event.input_tokens, event.cached_tokens, event.output_tokens, event.waived_tokens


def upstream(*, generated: int, silent: int = 0, characters: int) -> UpstreamReceipt:
    """Of an answer whose server kept the text of `silent` tokens of reasoning."""
    fields = asdict(receipt("req_1", generated=generated, delivered=generated))
    return UpstreamReceipt(
        **fields,
        counted_by=CountedBy.TOKENIZER,
        reasoning=silent,
        silent=silent,
        characters=characters,
    )


async def test_a_cancelled_request_is_written_once_and_acknowledged_when_durable(
    metering: Metering,
) -> None:
    meter = metering.meter()
    meter.close_soon(LEFT, receipt("req_1"))
    meter.close_soon(ANSWERED, receipt("req_1"))
    assert metering.acknowledged == []
    (event,) = metering.events()
    assert (counts(event), event.finish_reason, event.status) == ((10, 4, 3, 4), "abort", 499)
    assert metering.acknowledged == [("req_1",)]
    assert await meter.close(ANSWERED, receipt("req_1")) == event
    assert metering.events() == [event]


@pytest.mark.parametrize("soon", [True, False])
async def test_without_a_receipt_the_engine_keeps_its_own(metering: Metering, soon: bool) -> None:
    meter = metering.meter()
    if soon:
        meter.close_soon(LEFT, None)
    else:
        await meter.close(LEFT, None)
    assert [counts(event) for event in metering.events()] == [(10, 0, 3, 2)]
    assert metering.acknowledged == []


async def test_the_receipts_of_several_prompts_are_acknowledged_though_one_is_missing(
    metering: Metering,
) -> None:
    await metering.meter(replace(opened("req_1"), prompts=2)).close(LEFT, None)
    assert metering.acknowledged == [("req_1.0", "req_1.1")]


async def test_times_are_whole_milliseconds_and_the_first_token_is_timed_once(
    metering: Metering,
) -> None:
    meter = metering.meter()
    metering.clock.advance(0.25)
    meter.first_token()
    metering.clock.advance(1.0)
    meter.first_token()
    event = await meter.close(ANSWERED, replaced(receipt("req_1"), queue_s=0.125))
    assert (event.first_token_ms, event.duration_ms, event.queue_ms) == (250, 1250, 125)
    assert event.finished_at == metering.clock.now()
    alone = await metering.meter(opened("req_2")).close(ANSWERED, None)
    assert (alone.first_token_ms, alone.queue_ms, alone.settled_by) == (None, 0, SettledBy.GATEWAY)


async def test_the_event_says_what_the_engine_dropped(metering: Metering) -> None:
    both, alone = metering.meter(opened("req_1")), metering.meter(opened("req_2"))
    both.truncated = "turns=2"
    event = await both.close(ANSWERED, replaced(receipt("req_1"), dropped=90))
    assert event.truncated == "turns=2, tokens=90"
    event = await alone.close(ANSWERED, replaced(receipt("req_2"), dropped=7))
    assert event.truncated == "tokens=7"
    settled = event_of_receipt(opened("req_3"), replaced(receipt("req_3"), dropped=8), NOW)
    assert settled.truncated == "tokens=8"


async def test_the_event_carries_what_is_known_of_the_request(metering: Metering) -> None:
    record = replace(
        opened("req_1"),
        adapter="legal",
        adapter_digest="sha",
        member_id="mem_a",
        end_user="user-7",
        client_request_id="own-1",
        batch_job="batch_1",
    )
    meter = metering.meter(record)
    meter.streamed, meter.moderation, meter.prompt_order = True, "redact", "safe:moved"
    meter.truncated = "turns=2"
    event = await meter.close(replace(ANSWERED, paid_by="tenant", quantity=0), receipt("req_1"))
    for name in OpenedRequest.__struct_fields__:
        if name not in ("opened_at", "prompt_tokens", "prompts"):
            assert getattr(event, name) == getattr(record, name), name
    assert event.occurred_at == record.opened_at
    assert (event.streamed, event.moderation, event.prompt_order) == (True, "redact", "safe:moved")
    assert (event.truncated, event.paid_by, event.quantity) == ("turns=2", "tenant", 0)
    assert event.counted_by is CountedBy.ENGINE


async def test_the_starts_own_request_costs_nobody_anything(metering: Metering) -> None:
    meter = metering.meter()
    meter.is_warm_up = True
    event = await meter.close(ANSWERED, receipt("req_1"))
    assert counts(event) == (0, 0, 0, 0)
    assert (event.finish_reason, event.paid_by, event.quantity) == ("warm_up", "operator", 0)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [(LEFT, ((0, 0, 0, 7), "operator", 0)), (ANSWERED, ((10, 4, 6, 1), None, 1))],
)
async def test_a_batchs_line_that_was_cut_off_is_waived_whole(
    metering: Metering, ending: Ending, expected: tuple[tuple[int, ...], str | None, int]
) -> None:
    meter = metering.meter(replace(opened("req_1"), batch_job="batch_1"))
    event = await meter.close(ending, receipt("req_1"))
    assert (counts(event), event.paid_by, event.quantity) == expected


@pytest.mark.parametrize(
    ("failed", "routed", "note"),
    [
        ((), None, None),
        ((), "least load", "least load"),
        (("a", "b"), "least load", "fallback from a, b; least load"),
        (("a",), None, "fallback from a; "),
        (("m" * 200,), "x", "fallback from " + "m" * 106),
    ],
)
async def test_the_route_names_the_models_that_failed(
    metering: Metering, failed: tuple[str, ...], routed: str | None, note: str | None
) -> None:
    meter = metering.meter()
    meter.fallback_from, meter.routed = failed, routed
    assert (await meter.close(ANSWERED, None)).routed == note


@pytest.mark.parametrize(("as_given", "owed"), [(None, 0), (3, 1), (4, 0), (9, 0)])
async def test_prompt_order_is_owed_what_the_given_order_would_not_have_found_cached(
    metering: Metering, as_given: int | None, owed: int
) -> None:
    meter = metering.meter()
    meter.cached_as_given = as_given
    assert (await meter.close(ANSWERED, receipt("req_1"))).reordered_cached_tokens == owed


async def test_statements_of_a_batch_line_are_committed_with_the_event_once(
    metering: Metering,
) -> None:
    asked: list[UsageEvent] = []

    def _statements(event: UsageEvent) -> list[Statement]:
        asked.append(event)
        return [insert_receipt(EngineCount("req_1", "engine", 1, 0, 1, NOW))]

    meter = metering.meter()
    event = await meter.close(ANSWERED, receipt("req_1"), _statements)
    await meter.close(ANSWERED, receipt("req_1"), _statements)
    batch = decode_outbox(read(metering.file.connection, 100))
    assert (batch.usage, len(batch.receipts), asked) == ([event], 1, [event])


async def test_a_close_that_overtakes_the_statements_of_another_is_the_one_that_counts(
    metering: Metering,
) -> None:
    meter = metering.meter()
    loop = asyncio.get_running_loop()

    def _statements(event: UsageEvent) -> list[Statement]:
        async def _close() -> None:
            meter.close_soon(LEFT, receipt("req_1"))

        asyncio.run_coroutine_threadsafe(_close(), loop).result(30)
        return []

    event = await meter.close(ANSWERED, receipt("req_1"), _statements)
    assert event.finish_reason == "abort" and metering.events() == [event]


async def test_the_opened_record_follows_the_engine(metering: Metering) -> None:
    meter = metering.meter()
    await meter.write_opened()
    await meter.rerouted("other")
    assert [each.engine_id for each in metering.file.open_requests()] == ["other"]
    again = metering.meter(replace(opened("req_1"), model="second"))
    await again.write_opened(again=True)
    assert [each.model for each in metering.file.open_requests()] == ["second"]


async def test_the_metrics_count_each_kind_of_token_once(metering: Metering) -> None:
    def _now() -> list[float]:
        fold_all()
        kinds = ("input", "cached", "output", "waived")
        return [metrics.tokens.labels("metered", kind)._value.get() for kind in kinds]

    before = _now()
    await metering.meter(replace(opened("req_1"), model="metered")).close(
        ANSWERED, receipt("req_1")
    )
    metering.meter(replace(opened("req_2"), model="metered")).close_soon(LEFT, None)
    grown = [now - then for now, then in zip(_now(), before, strict=True)]
    assert grown == [20, 4, 9, 3]


def test_who_counted_is_the_engine_only_where_its_receipt_came() -> None:
    by_engine, by_text = ANSWERED, replace(ANSWERED, counted_by=CountedBy.TOKENIZER)
    assert counted_by(by_engine, receipt("req_1")) is CountedBy.ENGINE
    assert counted_by(by_engine, None) is CountedBy.GATEWAY
    assert counted_by(by_text, None) is CountedBy.TOKENIZER
    assert counted_by(LEFT, None) is None
    assert counted_by(by_engine, upstream(generated=5, characters=9)) is CountedBy.TOKENIZER


def test_a_blocked_prompt_is_billed_only_where_the_tenant_pays() -> None:
    pays, free = blocked_ending("tenant"), blocked_ending("operator")
    assert (pays.paid_by, pays.quantity, pays.status) == ("tenant", 1, 400)
    assert (free.paid_by, free.quantity) == ("operator", 0)
    assert counts_of(10, pays, None) == Counts(10, 0, 0, 0)
    assert counts_of(10, free, None) == Counts(0, 0, 0, 0)
    assert counts_of(10, refused_ending(429), None) == Counts(0, 0, 0, 0)
    assert (refused_ending(429).status, refused_ending(429).quantity) == (429, 1)


@pytest.mark.parametrize(
    ("delivered", "status", "silent", "output"),
    [
        (40, 200, 4, 12),
        (50, 499, 4, 12),
        (20, 499, 4, 8),
        (20, 499, 0, 6),
        (0, 499, 4, 0),
        (0, 200, 4, 0),
    ],
)
def test_an_upstreams_answer_is_billed_by_the_share_that_was_delivered(
    delivered: int, status: int, silent: int, output: int
) -> None:
    """Reasoning whose text the server kept is billed whole as soon as any of the answer is."""
    found = upstream(generated=12, silent=silent, characters=40)
    ending = Ending(delivered, 40, "stop", status, prompt_done=True)
    parts = Components(reasoning=min(silent, output)) if silent and output else None
    assert counts_of(99, ending, found) == Counts(10, 4, output, 12 - output, parts)


@pytest.mark.parametrize(("status", "output"), [(200, 5), (499, 0), (500, 0)])
def test_an_answer_of_reasoning_alone_is_billed_only_when_it_ended(
    status: int, output: int
) -> None:
    found = upstream(generated=5, silent=5, characters=0)
    counted = counts_of(99, Ending(0, 0, "stop", status, prompt_done=True), found)
    assert (counted.output, counted.waived) == (output, 5 - output)
