"""Bounds each of many waits of one task, with one timer for all of them.

`asyncio.timeout` makes two objects and a timer for each wait, which is a tenth of what a streamed
chunk costs. Here a wait notes when it began, and a timer that finds the present wait too young is
set again for the rest.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class IdleTimer:
    """Of one task: only that may call `wait`. `close` it when the task needs it no more."""

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()  # before any cancellation of ours
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._since: float | None = None  # when the present wait began
        self._expired = False  # it took too long, and the task was cancelled for it
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of `work`. TimeoutError after `seconds`; `work` is cancelled then."""
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._since + self._seconds, self._look)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._expired:
                raise
            self._end_expiry()
            raise TimeoutError from None
        finally:
            self._since = None
            if self._expired:  # and `work` has ended all the same
                self._end_expiry()

    def restart(self) -> None:
        """The present wait begins now: what is waited for has shown a sign of life."""
        if self._since is not None:
            self._since = self._loop.time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return  # the next wait sets a timer
        until = self._since + self._seconds
        if self._loop.time() < until:
            self._timer = self._loop.call_at(until, self._look)
        else:
            self._expired = True
            self._task.cancel()

    def _end_expiry(self) -> None:
        """Raises CancelledError where somebody else has cancelled the task too."""
        self._expired = False
        if self._task.uncancel() > self._cancelling:
            raise asyncio.CancelledError
