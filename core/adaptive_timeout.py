"""A time-out for server replies that adapts to the load of this machine."""

import asyncio
from collections.abc import Coroutine
from itertools import chain, repeat
from typing import Any

from core.cpu_wait import cpu_wait_s

# Grace turns after the time-out, in which a busy event loop reads a reply that arrived in time.
_GRACE_TURNS, _TURN_S = 4, 0.002
_NORMAL_DELAY_S = 0.004  # normal delay of a loop turn
_FAST_SHARE = 0.25  # of the time-out: a reply within it needs no check of the machine's load
_MAX_TIMEOUT_S = 1.0  # upper bound of the extended time-out
# A server on loaded cores is slow without being down: it gets `_AVERAGE_MULTIPLE` times its usual
# reply time.
# `_NEWEST_WEIGHT` is the weight of the newest reply in that average.
_AVERAGE_MULTIPLE, _NEWEST_WEIGHT = 8, 0.1


class AdaptiveTimeout:
    """For one server with one call at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._average_s = 0.0  # moving average of the reply time

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work` and re-raise its error. TimeoutError cancels it if the server is silent."""
        loop = asyncio.get_running_loop()
        started, maximum = loop.time(), max(_MAX_TIMEOUT_S, self._timeout_s)
        timeout = min(max(self._timeout_s, _AVERAGE_MULTIPLE * self._average_s), maximum)
        try:
            async with asyncio.timeout(None) as limit:
                deadline = _Deadline(limit, started, timeout, maximum)
                try:
                    await work
                finally:
                    deadline.cancel()
        except TimeoutError:
            waited = (loop.time() - started) * 1000
            raise TimeoutError(f"no answer within {waited:.0f} ms") from None
        self._average_s += _NEWEST_WEIGHT * (loop.time() - started - self._average_s)


class _Deadline:
    """Checks a few times while waiting, and extends the deadline by the delays of this machine."""

    def __init__(
        self, limit: asyncio.Timeout, started: float, timeout: float, maximum: float
    ) -> None:
        self._limit = limit
        self._last = started + maximum
        self._end = min(started + timeout + _GRACE_TURNS * _TURN_S, self._last)
        self._pauses = chain((timeout * _FAST_SHARE, timeout * (1 - _FAST_SHARE)), repeat(_TURN_S))
        self._waited: float | None = None  # time that this thread waited for a CPU
        self._schedule_check(started)

    def cancel(self) -> None:
        self._timer.cancel()

    def _schedule_check(self, now: float) -> None:
        self._due = now + next(self._pauses)
        self._timer = asyncio.get_running_loop().call_at(self._due, self._check)

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        # If this loop ran late or this thread waited for a CPU, the machine was busy, and the server
        # may have been delayed as well.
        delay = max(0.0, now - self._due - _NORMAL_DELAY_S)
        before, self._waited = self._waited, cpu_wait_s()
        if before is not None:
            delay = max(delay, self._waited - before)
        self._end = min(self._end + 2 * delay, self._last)
        if now < self._end:
            self._schedule_check(now)
        else:
            self._limit.reschedule(now)
