"""Recovery step by step: what is settled when, and how a receipt becomes an event."""

import asyncio
import sqlite3
from dataclasses import replace as replaced
from pathlib import Path

import pytest
from msgspec.structs import replace

from core.clock import FakeClock
from core.events import CountedBy, EngineCount, SettledBy, UsageEvent
from engine.protocol import FinishReason
from gateway.metering.recovery import Recovery, event_of_receipt
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import insert_opened, move_to_outbox, move_to_parked
from gateway.request.engine import RequestStillRunning
from tests.gateway.metering.spool_rows import NOW, closed, opened
from tests.gateway.metering.test_spool import Books, Receipts, receipt, recovery


def leave(path: Path, *names: str) -> None:
    """The spool file of a process that died with these requests open."""
    file = SpoolFile(path)
    file.commit([insert_opened(opened(name)) for name in names])
    file.close()


async def test_the_first_round_is_done_once_one_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path / "dead.db", "req_1")
    books = Books()
    rescue = recovery(tmp_path, books, Receipts(), FakeClock(NOW))
    plain, done = rescue._adopt, []

    def _fail_first() -> None:
        done.append(rescue.first_round_done.is_set())
        if len(done) == 1:
            raise OSError("the directory cannot be read")
        plain()

    monkeypatch.setattr(rescue, "_adopt", _fail_first)
    task = asyncio.create_task(rescue.run(every_s=0.0))
    await asyncio.wait_for(rescue.first_round_done.wait(), 30)
    task.cancel()
    assert done[:2] == [False, False] and list(books.got) == ["req_1"]


async def test_a_silent_engine_is_waited_for_a_minute_longer_than_any_request_lives(
    tmp_path: Path,
) -> None:
    leave(tmp_path / "dead.db", "req_1")
    books, receipts, clock = Books(), Receipts(), FakeClock(NOW)
    receipts.silent = True
    rescue = recovery(tmp_path, books, receipts, clock)
    clock.advance(659.999)
    assert await rescue.round() == 0
    clock.advance(0.001)
    assert await rescue.round() == 1
    event = books.got["req_1"]
    assert (event.settled_by, event.status, event.finish_reason) == (
        *(SettledBy.EXPIRY, 500, "expired"),
    )
    assert (event.input_tokens, event.output_tokens, event.waived_tokens) == (0, 0, 0)


async def test_a_request_that_is_parked_is_not_counted_as_settled(tmp_path: Path) -> None:
    leave(tmp_path / "dead.db", "req_1", "req_2")
    receipts = Receipts()
    # More cached than prompt tokens: no usage event can be made of it.
    receipts.known["req_1"] = replaced(receipt("req_1"), cached=99)
    rescue = recovery(tmp_path, Books(), receipts, FakeClock(NOW))
    assert await rescue.round() == 1
    assert rescue.parked() == 1
    rescue.close()
    assert rescue.adopted() == []


async def test_what_follows_a_settlement_may_fail_and_is_tried_for_each(tmp_path: Path) -> None:
    leave(tmp_path / "dead.db", "req_1", "req_2")
    receipts, released = Receipts(), list[str]()
    receipts.known["req_1"] = receipt("req_1")

    async def _release(event: UsageEvent) -> None:
        released.append(event.request_id)
        raise OSError("the counters are away")

    async def _acknowledge(request_ids: list[str]) -> None:
        raise OSError("the engine is away")

    receipts.acknowledge = _acknowledge  # type: ignore[method-assign]
    books = Books()
    rescue = Recovery(
        *(tmp_path, tmp_path / "own.db", books, receipts, FakeClock(NOW)),
        longest_life_s=600,
        on_settled=_release,
    )
    assert await rescue.round() == 2
    assert released == ["req_1", "req_2"] and sorted(books.got) == released


async def test_files_of_the_living_and_ones_own_are_left_alone(tmp_path: Path) -> None:
    living = SpoolFile(tmp_path / "living.db")
    living.commit(move_to_outbox(closed("req_1")))
    leave(tmp_path / "own.db", "req_2")
    leave(tmp_path / "dead.db", "req_3")
    books, receipts = Books(), Receipts()
    receipts.running = {"req_3"}
    rescue = recovery(tmp_path, books, receipts, FakeClock(NOW))
    assert await rescue.round() == 0
    assert [each.path.name for each in rescue.adopted()] == ["dead.db"] and not books.got
    receipts.running.clear()
    assert await rescue.round() == 1
    assert rescue.adopted() == [] and not (tmp_path / "dead.db").exists()
    living.close()


async def test_a_file_that_fails_holds_up_no_other_and_is_tried_again(tmp_path: Path) -> None:
    leave(tmp_path / "a.db", "req_1")
    leave(tmp_path / "b.db", "req_2")
    books = Books()

    class _Failing(Receipts):
        async def receipts_of(self, record):  # type: ignore[no-untyped-def]
            if record.request_id == "req_1" and "req_1" not in self.known:
                raise RuntimeError("a fault")
            return await super().receipts_of(record)

    receipts = _Failing()
    rescue = recovery(tmp_path, books, receipts, FakeClock(NOW))
    assert await rescue.round() == 1 and list(books.got) == ["req_2"]
    receipts.known["req_1"] = receipt("req_1")
    assert await rescue.round() == 1
    assert books.got["req_1"].settled_by is SettledBy.RECEIPT


def test_an_event_of_a_receipt_says_how_it_ended_and_how_long_it_took() -> None:
    for reason, status in (
        (FinishReason.STOP, 200),
        (FinishReason.LENGTH, 200),
        (FinishReason.ABORT, 499),
    ):
        found = replaced(
            receipt("req_1"), finish_reason=reason, queue_s=0.25, prefill_s=0.5, decode_s=1.0
        )
        event = event_of_receipt(opened("req_1"), found, NOW)
        assert (event.status, event.finish_reason) == (status, str(reason))
        assert (event.queue_ms, event.duration_ms) == (250, 1750)
        assert (event.quantity, event.paid_by) == (1, None)
        assert (event.counted_by, event.settled_by) == (CountedBy.ENGINE, SettledBy.RECEIPT)
        assert (event.output_tokens, event.waived_tokens) == (6, 1)


def test_no_more_is_billed_than_was_generated() -> None:
    found = receipt("req_1", generated=3, delivered=9)
    event = event_of_receipt(opened("req_1"), found, NOW)
    assert (event.output_tokens, event.waived_tokens) == (3, 0)


def test_a_line_of_a_batch_is_waived_because_it_runs_again() -> None:
    line = replace(opened("req_1"), batch_job="batch_1")
    event = event_of_receipt(line, receipt("req_1"), NOW)
    assert (event.input_tokens, event.output_tokens, event.waived_tokens) == (0, 0, 7)
    assert (event.quantity, event.paid_by) == (0, "operator")


async def test_stored_counts_settle_as_delivered(tmp_path: Path) -> None:
    leave(tmp_path / "dead.db", "req_1")
    asked: list[tuple[list[str], str]] = []

    def _stored(request_ids, engine_id):  # type: ignore[no-untyped-def]
        asked.append((list(request_ids), engine_id))
        return [EngineCount("req_1", engine_id, 10, 4, 7, NOW)]

    books = Books()
    rescue = Recovery(
        *(tmp_path, tmp_path / "own.db", books, Receipts(), FakeClock(NOW)),
        longest_life_s=600,
        on_settled=_nothing,
        stored_counts=_stored,
    )
    assert await rescue.round() == 1
    event = books.got["req_1"]
    assert asked == [(["req_1"], "engine")]
    assert (event.input_tokens, event.cached_tokens) == (10, 4)
    assert (event.output_tokens, event.waived_tokens, event.status) == (7, 0, 499)
    assert (event.counted_by, event.duration_ms, event.queue_ms) == (None, 0, 0)


async def _nothing(_event: UsageEvent) -> None:
    return


async def test_a_running_request_is_asked_about_in_every_round(tmp_path: Path) -> None:
    leave(tmp_path / "dead.db", "req_1")
    clock, rounds = FakeClock(NOW), list[str]()

    class _Running(Receipts):
        async def receipts_of(self, record):  # type: ignore[no-untyped-def]
            rounds.append(record.request_id)
            raise RequestStillRunning("runs")

    rescue = recovery(tmp_path, Books(), _Running(), clock)
    clock.advance(100_000)
    assert [await rescue.round(), await rescue.round()] == [0, 0]
    assert rounds == ["req_1", "req_1"]
    rescue.close()


async def test_a_file_whose_parked_records_cannot_be_put_back_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SpoolFile(tmp_path / "dead.db")
    file.commit(move_to_outbox(closed("req_1")))
    file.commit(move_to_parked(1, "the database was at fault"))
    file.close()
    books, plain = Books(), SpoolFile.commit

    def _full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(SpoolFile, "commit", _full)
    rescue = recovery(tmp_path, books, Receipts(), FakeClock(NOW))
    assert await rescue.round() == 0 and rescue.adopted() == []
    monkeypatch.setattr(SpoolFile, "commit", plain)
    await rescue.round()
    assert list(books.got) == ["req_1"] and not (tmp_path / "dead.db").exists()
