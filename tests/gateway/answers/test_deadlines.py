"""The deadlines of requests: as `asyncio.timeout`, with one timer for all of them."""

import asyncio
from collections.abc import Iterator

import pytest

from gateway.answers.deadlines import Deadlines

LONG = 3_600.0


class ManualLoop(asyncio.SelectorEventLoop):
    """Its clock moves only by `advance`; due timers then run in the next turns."""

    moved = 0.0

    def time(self) -> float:
        return self.moved

    async def advance(self, seconds: float) -> None:
        self.moved += seconds
        for _ in range(6):
            await asyncio.sleep(0)


@pytest.fixture
def loop() -> Iterator[ManualLoop]:
    made = ManualLoop()
    yield made
    made.close()


async def _request(deadlines: Deadlines, seconds: float, work: "asyncio.Future[None]") -> str:
    try:
        with deadlines.within(seconds):
            await work
    except TimeoutError:
        return "late"
    return "done"


def test_a_request_past_its_deadline_gets_a_timeout_and_its_work_is_cancelled(
    loop: ManualLoop,
) -> None:
    async def _run() -> None:
        work = loop.create_future()
        task = loop.create_task(_request(Deadlines(), 2.0, work))
        await loop.advance(0)
        await loop.advance(1.9)
        assert not task.done()
        await loop.advance(0.2)
        assert task.result() == "late"
        assert work.cancelled()

    loop.run_until_complete(_run())


def test_each_of_many_deadlines_is_kept_in_any_order(loop: ManualLoop) -> None:
    seconds = [LONG, 3.0, 1.0, 2.0, LONG, 1.5]

    async def _run() -> None:
        deadlines, tasks = Deadlines(), []
        for each in seconds:
            tasks.append(loop.create_task(_request(deadlines, each, loop.create_future())))
            await loop.advance(0)
        for moment in (1.0, 1.5, 2.0, 3.0):
            await loop.advance(moment - loop.time() + 0.01)
            late = [each for each, task in zip(seconds, tasks, strict=True) if task.done()]
            assert sorted(late) == sorted(each for each in seconds if each <= moment)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop.run_until_complete(_run())


def test_a_request_that_ended_leaves_nothing_that_fires(loop: ManualLoop) -> None:
    async def _run() -> None:
        deadlines, work = Deadlines(), loop.create_future()
        work.set_result(None)
        assert await _request(deadlines, 1.0, work) == "done"
        await loop.advance(2.0)  # the timer that was set for it finds nothing
        late = loop.create_task(_request(deadlines, 1.0, loop.create_future()))
        await loop.advance(0)
        await loop.advance(0.5)
        assert not late.done()
        await loop.advance(0.6)
        assert late.result() == "late"

    loop.run_until_complete(_run())


def test_a_cancellation_by_somebody_else_is_no_timeout(loop: ManualLoop) -> None:
    async def _run() -> None:
        before = loop.create_task(_request(Deadlines(), LONG, loop.create_future()))
        both = loop.create_task(_request(Deadlines(), 1.0, loop.create_future()))
        await loop.advance(0)
        before.cancel()
        both.cancel()
        loop.moved += 2.0  # its deadline is over in the turn in which it was cancelled
        await loop.advance(0)
        assert before.cancelled()
        assert both.cancelled()

    loop.run_until_complete(_run())


def test_work_that_ends_in_the_turn_of_its_deadline_counts(loop: ManualLoop) -> None:
    async def _ends(work: "asyncio.Future[None]") -> None:
        try:
            await work
        except asyncio.CancelledError:
            return  # it has ended all the same

    async def _whole() -> int:
        with Deadlines().within(1.0):
            await _ends(loop.create_future())
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    async def _run() -> None:
        task = loop.create_task(_whole())
        await loop.advance(0)
        await loop.advance(1.1)
        assert task.result() == 0

    loop.run_until_complete(_run())
