"""How long an answer is waited for: no longer than told, but for what the machine itself took."""

import asyncio
import time

import pytest

from core.adaptive_timeout import AdaptiveTimeout


async def test_an_answer_in_time_passes_and_so_does_what_it_raises() -> None:
    patience, came = AdaptiveTimeout(0.05), []

    async def _quick() -> None:
        await asyncio.sleep(0.001)
        came.append(1)

    async def _wrong() -> None:
        raise ValueError("wrong")

    await patience.wait(_quick())
    assert came == [1]
    with pytest.raises(ValueError, match="wrong"):
        await patience.wait(_wrong())


async def test_silence_ends_it_and_the_work_is_cancelled() -> None:
    ended: list[str] = []

    async def _silent() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within"):
        await AdaptiveTimeout(0.03).wait(_silent())
    assert ended == ["cancelled"]
    assert 0.03 <= time.monotonic() - began < 60


async def test_a_loop_that_was_busy_itself_does_not_count_as_silence() -> None:
    came, ended = asyncio.Event(), []

    async def _busy() -> None:
        await came.wait()
        ended.append("answered")

    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 0.1)  # nothing is read meanwhile
    loop.call_later(0.11, came.set)
    await AdaptiveTimeout(0.03).wait(_busy())
    assert ended == ["answered"]


async def test_a_server_that_is_always_slow_gets_more_time() -> None:
    timeout, ended = AdaptiveTimeout(0.03), []

    async def _slow(seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append(seconds)

    for _ in range(20):
        await timeout.wait(_slow(0.02))
    await timeout.wait(_slow(0.06))
    assert ended == [0.02] * 20 + [0.06]
