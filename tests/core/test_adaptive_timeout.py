"""How long an answer is waited for: no longer than told, but for what the machine itself took."""

import asyncio
import socket
import time
from itertools import count

import pytest

from core import adaptive_timeout
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


async def test_a_reply_that_came_while_the_loop_was_blocked_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it was blocked: the server has answered, and was not down."""
    monkeypatch.setattr(adaptive_timeout, "LONGEST_S", 0.3)
    for blocked_s in (0.2, 0.5, 1.2):
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)

        async def _ask(reader: asyncio.StreamReader = reader) -> None:
            assert await reader.readexactly(2) == b"ok"

        asyncio.get_running_loop().call_soon(_answer_and_block, theirs, blocked_s)
        await AdaptiveTimeout(0.01).wait(_ask())
        writer.close()
        await writer.wait_closed()
        theirs.close()


def _answer_and_block(server: socket.socket, seconds: float) -> None:
    server.send(b"ok")
    time.sleep(seconds)


async def test_a_silent_server_is_found_by_a_loop_that_is_always_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adaptive_timeout, "LONGEST_S", 0.1)
    loop, late = asyncio.get_running_loop(), []

    def _block() -> None:
        time.sleep(0.01)
        late.append(loop.call_soon(_block))

    _block()
    with pytest.raises(TimeoutError, match="no answer within"):
        await AdaptiveTimeout(0.01).wait(_never())
    late[-1].cancel()


async def _never() -> None:
    await asyncio.Event().wait()


async def test_a_machine_without_a_free_cpu_gives_its_server_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pressure = count()
    monkeypatch.setattr(adaptive_timeout, "cpu_pressure_s", lambda: next(pressure) * 0.01)
    answered = []

    async def _slow() -> None:
        await asyncio.sleep(0.3)
        answered.append(1)

    await AdaptiveTimeout(0.01).wait(_slow())
    assert answered == [1]
    with pytest.raises(TimeoutError, match="no answer within"):  # in the end it is down
        await AdaptiveTimeout(0.01).wait(_never())


async def test_what_a_probe_measures_is_the_time_that_later_calls_have() -> None:
    timeout, answered = AdaptiveTimeout(0.01), []

    async def _slow() -> None:
        await asyncio.sleep(0.2)
        answered.append(1)

    await timeout.measure(_slow())
    await timeout.wait(_slow())
    assert len(answered) == 2
