"""A time-out for server replies that tells a slow server, or a busy machine, from a silent server."""

import asyncio
from collections.abc import Coroutine
from itertools import chain, repeat
from typing import Any

from core.cpu_wait import cpu_pressure_s, cpu_wait_s

# Grace turns after the time-out, in which a busy event loop reads a reply that arrived in time.
_GRACE_TURNS, _TURN_S = 4, 0.002
_NORMAL_DELAY_S = 0.004  # normal delay of a loop turn
_FAST_SHARE = 0.25  # of the time-out: a reply within it needs no check of the machine's load
_MAX_TIMEOUT_S = 1.0  # upper bound of the extended time-out, without what this loop was late
LONGEST_S = 5.0  # after which only the grace turns are left, however late this loop is
# A server on loaded cores is slow without being down: it gets `_AVERAGE_MULTIPLE` times its usual
# reply time.
# `_NEWEST_WEIGHT` is the weight of the newest reply in that average.
_AVERAGE_MULTIPLE, _NEWEST_WEIGHT = 8, 0.1


class AdaptiveTimeout:
    """For one server with one call at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._average_s = 0.0  # moving average of the reply time
        self._maximum_s = max(_MAX_TIMEOUT_S, timeout_s)

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work` and re-raise its error. TimeoutError cancels it if the server is silent."""
        timeout = max(self._timeout_s, _AVERAGE_MULTIPLE * self._average_s)
        took = await self._within(timeout, work)
        self._average_s += _NEWEST_WEIGHT * (took - self._average_s)

    async def wait_long(self, work: Coroutine[Any, Any, None]) -> float:
        """As `wait`, as long as the slowest server may take, for a probe that nobody waits for.
        Returns the seconds that it took."""
        return await self._within(self._maximum_s, work)

    async def measure(self, work: Coroutine[Any, Any, None]) -> None:
        """As `wait_long`. Later calls give the server the time that this one shows it to need."""
        self._average_s = max(self._average_s, await self.wait_long(work))

    async def _within(self, timeout: float, work: Coroutine[Any, Any, None]) -> float:
        """Returns the seconds that `work` took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(None) as limit:
                deadline = _Deadline(limit, min(timeout, self._maximum_s), self._maximum_s)
                try:
                    await work
                finally:
                    deadline.cancel()
        except TimeoutError:
            waited = (loop.time() - started) * 1000
            raise TimeoutError(f"no answer within {waited:.0f} ms") from None
        return loop.time() - started


class _Deadline:
    """Checks a few times while waiting, and extends the deadline by the delays of this machine."""

    def __init__(self, limit: asyncio.Timeout, timeout: float, maximum: float) -> None:
        self._limit = limit
        started = asyncio.get_running_loop().time()
        self._end = started + timeout + _GRACE_TURNS * _TURN_S
        self._last = started + maximum + _GRACE_TURNS * _TURN_S
        self._longest = started + max(LONGEST_S, maximum)
        self._grace = 0  # turns that have to pass before the deadline may fall, after a late one
        self._pauses = chain((timeout * _FAST_SHARE, timeout * (1 - _FAST_SHARE)), repeat(_TURN_S))
        self._busy: tuple[float, float] | None = None  # of this thread, of the machine
        self._schedule_check(started)

    def cancel(self) -> None:
        self._timer.cancel()

    def _schedule_check(self, now: float) -> None:
        self._due = now + next(self._pauses)
        self._timer = asyncio.get_running_loop().call_at(self._due, self._check)

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        # If this loop ran late or a thread waited for a CPU, the machine was busy, and the server may
        # have been delayed as well.
        late = max(0.0, now - self._due - _NORMAL_DELAY_S)
        if late and now < self._longest:
            # A reply that came meanwhile is unread: the loop runs timers before it reads.
            self._grace = _GRACE_TURNS
        self._last = min(self._last + late, self._longest)
        self._end = min(self._end + 2 * max(late, self._waited_s()), self._last)
        if now < self._end or self._grace > 0:
            self._grace -= now >= self._end
            self._schedule_check(now)
        else:
            self._limit.reschedule(now)

    def _waited_s(self) -> float:
        """Of a thread of this machine for a CPU, since the last check."""
        before, self._busy = self._busy, (cpu_wait_s(), cpu_pressure_s())
        if before is None:
            return 0.0
        return max(now - then for now, then in zip(self._busy, before, strict=True))
