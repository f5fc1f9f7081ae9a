"""A time-out for server replies that adapts to the load of this machine."""

import asyncio
from collections.abc import Coroutine
from itertools import chain, repeat
from typing import Any

from core.turns import waited_s

# Grace turns after the time-out, in which a busy event loop reads a reply that arrived in time.
_TURNS, _TURN_S = 4, 0.002
_LATE_S = 0.004  # normal delay of a loop turn
_PROMPT = 0.25  # of the time-out: a reply within it needs no check of the machine's load
_LONGEST_S = 1.0  # upper bound of the extended time-out
# A server on loaded cores is slow without being down: it gets `_USUAL` times its usual reply time.
# `_NEWEST` is the weight of the newest reply in that average.
_USUAL, _NEWEST = 8, 0.1


class Patience:
    """For one server with one call at a time."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._usual_s = 0.0  # moving average of the reply time

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work` and re-raise its error. TimeoutError cancels it if the server is silent."""
        loop = asyncio.get_running_loop()
        began, longest = loop.time(), max(_LONGEST_S, self._allowed_s)
        allowed = min(max(self._allowed_s, _USUAL * self._usual_s), longest)
        try:
            async with asyncio.timeout(None) as limit:
                watch = _Watch(limit, began, allowed, longest)
                try:
                    await work
                finally:
                    watch.over()
        except TimeoutError:
            waited = (loop.time() - began) * 1000
            raise TimeoutError(f"no answer within {waited:.0f} ms") from None
        self._usual_s += _NEWEST * (loop.time() - began - self._usual_s)


class _Watch:
    """Checks a few times while waiting, and extends the deadline by the delays of this machine."""

    def __init__(
        self, limit: asyncio.Timeout, began: float, allowed: float, longest: float
    ) -> None:
        self._limit = limit
        self._last = began + longest
        self._end = min(began + allowed + _TURNS * _TURN_S, self._last)
        self._pauses = chain((allowed * _PROMPT, allowed * (1 - _PROMPT)), repeat(_TURN_S))
        self._waited: float | None = None  # time that this thread waited for a CPU
        self._sleep(began)

    def over(self) -> None:
        self._timer.cancel()

    def _sleep(self, now: float) -> None:
        self._due = now + next(self._pauses)
        self._timer = asyncio.get_running_loop().call_at(self._due, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        # If this loop ran late or this thread waited for a CPU, the machine was busy, and the server
        # may have been delayed as well.
        late = max(0.0, now - self._due - _LATE_S)
        before, self._waited = self._waited, waited_s()
        if before is not None:
            late = max(late, self._waited - before)
        self._end = min(self._end + 2 * late, self._last)
        if now < self._end:
            self._sleep(now)
        else:
            self._limit.reschedule(now)
