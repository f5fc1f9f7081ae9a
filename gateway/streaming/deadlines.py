"""The deadlines of all running requests, with one timer.

`asyncio.timeout` makes two objects and a timer for each request. Here a request notes when it must
end, and the timer is set for the earliest end known when it was last set: of requests that ended in
time it costs a dictionary entry each.
"""

import asyncio
from math import inf
from types import TracebackType

from core.errors import TollhouseError, Unavailable


class Deadlines:
    """Of one event loop at a time."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf  # when the timer fires

    def within(self, seconds: float | None) -> "Deadline":
        """A context that raises TimeoutError in the current task once the seconds are over, and
        cancels what it awaits. None: no deadline."""
        return Deadline(self, seconds)

    def add(self, deadline: "Deadline", loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            self._loop, self._timer, self._due = loop, None, inf
            self._running.clear()
        self._running[deadline] = None
        if deadline.at < self._due:
            self._set(deadline.at)

    def remove(self, deadline: "Deadline") -> None:
        self._running.pop(deadline, None)

    def _set(self, at: float) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._due = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        assert self._loop is not None
        self._timer, self._due = None, inf
        now = self._loop.time()
        for late in [each for each in self._running if each.at <= now]:
            del self._running[late]
            late.expire()
        if self._running:
            self._set(min(each.at for each in self._running))


class Deadline:
    __slots__ = ("_all", "_cancelling", "_expired", "_seconds", "_task", "at")

    def __init__(self, of: Deadlines, seconds: float | None) -> None:
        self._all = of
        self._seconds = seconds
        self._expired = False
        self.at = inf  # in the time of the event loop

    def __enter__(self) -> None:
        if self._seconds is None:
            return
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()  # before any cancellation of ours
        self.at = loop.time() + self._seconds
        self._all.add(self, loop)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._expired:
            self._all.remove(self)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()


def deadline_exceeded() -> TollhouseError:
    return Unavailable(
        "The request exceeded its deadline.",
        next_step="Request fewer tokens, or allow more time with x-request-timeout-ms.",
        code="deadline_exceeded",
    )
