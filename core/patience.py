"""A time limit for an answer that tells a silent server from a busy machine."""

import asyncio
from collections.abc import Coroutine
from itertools import chain, repeat
from typing import Any

from core.turns import waited_s

# After the time allowed come the turns in which a loop that was busy itself reads what the server
# had said in time.
_TURNS, _TURN_S = 4, 0.002
_LATE_S = 0.004  # an ordinary turn's delay
_PROMPT = 0.25  # of the time: whoever answers within it costs no look at how busy the machine is
_LONGEST_S = 1.0  # on the busiest machine
# A server that shares its cores with a load is slow before it is silent: so many times its usual
# answer is no silence yet.
_USUAL, _NEWEST = 8, 0.1


class Patience:
    """For one server, asked one thing after the other."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._usual_s = 0.0  # of an answer, the newest weighing a tenth

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """What `work` raises, or TimeoutError where the server is silent: it is cancelled then."""
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
    """Looks a few times while it waits; moves the end by what the machine itself took."""

    def __init__(
        self, limit: asyncio.Timeout, began: float, allowed: float, longest: float
    ) -> None:
        self._limit = limit
        self._last = began + longest
        self._end = min(began + allowed + _TURNS * _TURN_S, self._last)
        self._pauses = chain((allowed * _PROMPT, allowed * (1 - _PROMPT)), repeat(_TURN_S))
        self._waited: float | None = None  # of this thread, for a core
        self._sleep(began)

    def over(self) -> None:
        self._timer.cancel()

    def _sleep(self, now: float) -> None:
        self._due = now + next(self._pauses)
        self._timer = asyncio.get_running_loop().call_at(self._due, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        # Where this loop came late itself, or this thread had to wait for a core, the machine was
        # busy, and the server may have waited for its turn as we did.
        late = max(0.0, now - self._due - _LATE_S)
        before, self._waited = self._waited, waited_s()
        if before is not None:
            late = max(late, self._waited - before)
        self._end = min(self._end + 2 * late, self._last)
        if now < self._end:
            self._sleep(now)
        else:
            self._limit.reschedule(now)
