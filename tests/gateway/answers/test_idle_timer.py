"""One timer for many waits: each wait is bounded as by `asyncio.timeout`, and no cancellation is lost."""

import asyncio

import pytest

from gateway.answers.idle_timer import IdleTimer


async def _after(seconds: float, value: int = 1) -> int:
    await asyncio.sleep(seconds)
    return value


async def test_each_wait_is_bounded_by_itself() -> None:
    """Waits that are short one by one pass, however long they are together."""
    timer = IdleTimer(0.5)
    assert [await timer.wait(_after(0.2, number)) for number in range(5)] == [0, 1, 2, 3, 4]
    timer.close()


async def test_a_wait_that_is_too_long_ends_and_the_next_one_is_bounded_again() -> None:
    timer = IdleTimer(0.05)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await timer.wait(asyncio.Event().wait())
        assert await timer.wait(_after(0)) == 1
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    timer.close()


async def test_the_time_between_waits_does_not_count() -> None:
    timer = IdleTimer(0.5)
    await timer.wait(_after(0))
    await asyncio.sleep(0.7)  # the timer runs out meanwhile
    assert await timer.wait(_after(0.1)) == 1
    timer.close()


async def test_a_cancellation_from_elsewhere_passes_through() -> None:
    async def _work() -> None:
        timer = IdleTimer(20)
        try:
            await timer.wait(asyncio.Event().wait())
        finally:
            timer.close()

    task = asyncio.ensure_future(_work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_ends_as_its_time_does_is_not_lost() -> None:
    """The result arrives in the same turn of the loop as the end of its time: it is there for the
    next wait."""
    timer = IdleTimer(20)
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def _both() -> None:
        answer.set_result(7)
        timer._seconds = 0.0
        timer._look()

    asyncio.get_running_loop().call_soon(_both)
    with pytest.raises(TimeoutError):
        await timer.wait(answer)
    assert await timer.wait(answer) == 7
    await asyncio.sleep(0.01)  # no cancellation is left over
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    timer.close()


async def test_work_that_swallows_its_cancellation_leaves_none_behind() -> None:
    timer = IdleTimer(0.05)

    async def _stubborn() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 3
        return 0

    assert await timer.wait(_stubborn()) == 3
    await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    timer.close()


async def test_an_error_of_the_work_is_its_own() -> None:
    timer = IdleTimer(20)

    async def _fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await timer.wait(_fail())
    timer.close()


async def test_a_cancellation_that_comes_with_the_end_of_the_time_is_not_lost() -> None:
    """The request is shut down in the turn in which a keep-alive is due: it ends."""
    ended = []

    async def _work() -> None:
        timer = IdleTimer(0.02)
        task = asyncio.current_task()
        assert task is not None

        async def _shut_down_meanwhile() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                task.cancel()
                raise

        try:
            await timer.wait(_shut_down_meanwhile())
        except BaseException as error:
            ended.append(type(error))
            raise
        finally:
            timer.close()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.ensure_future(_work())
    assert ended == [asyncio.CancelledError]


async def test_a_cancellation_after_a_wait_that_was_too_long_is_not_taken_for_another() -> None:
    ended = []

    async def _work() -> None:
        timer = IdleTimer(0.02)
        with pytest.raises(TimeoutError):
            await timer.wait(asyncio.Event().wait())
        timer._seconds = 20.0
        try:
            await timer.wait(asyncio.Event().wait())
        except BaseException as error:
            ended.append(type(error))
            raise
        finally:
            timer.close()

    task = asyncio.ensure_future(_work())
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [asyncio.CancelledError]
