"""The deadlines of all running requests, with one timer, and their end before it: by a drain, or when
the right of their key ends.

`asyncio.timeout` makes two objects and a timer for each request. Here a request notes when it must
end, and the timer is set for the earliest end known when it was last set: of requests that ended in
time it costs a dictionary entry each.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from math import inf
from types import TracebackType

from core.errors import TollhouseError, Unavailable
from core.tenants.keys import Principal

_MAX_ENDED = 10_000


class Deadlines:
    """Of one event loop at a time."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf  # when the timer fires
        # Tenants and errors of keys whose right has ended, for requests that were admitted before and
        # begin now.
        self.ended: OrderedDict[str, tuple[str, TollhouseError]] = OrderedDict()

    def within(self, seconds: float, owner: Principal | None = None) -> "Deadline":
        """A context that raises TimeoutError in the current task once the seconds are over, or the
        error with which the request is ended before, and cancels what it awaits."""
        return Deadline(self, seconds, owner)

    def owners(self) -> dict[str, Principal]:
        """Of the running requests, by key."""
        owners = [each.owner for each in self._running if each.owner is not None]
        return {each.key_id: each for each in owners}

    def end(self, error: TollhouseError, of: Callable[[Principal], bool] | None = None) -> int:
        """End the running requests of these owners, or of all, with the error; returns how many. Those
        without an owner go on."""
        owned = [each for each in self._running if each.owner is not None]
        ending = [each for each in owned if of is None or (each.owner and of(each.owner))]
        for each in ending:
            del self._running[each]
            each.expire(error)
        return len(ending)

    def end_key(self, key_id: str, tenant_id: str, error: TollhouseError) -> int:
        """As `end`, also for the key's requests that are admitted and have not begun."""
        self.ended[key_id] = (tenant_id, error)
        if len(self.ended) > _MAX_ENDED:
            self.ended.popitem(last=False)
        return self.end(error, lambda owner: owner.key_id == key_id)

    def expired(self, now: datetime) -> list[Principal]:
        """Owners of running requests whose keys have expired."""
        owners = self.owners().values()
        return [each for each in owners if each.expires_at and each.expires_at <= now]

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
        earliest = min([each.at for each in self._running], default=inf)
        if earliest < inf:
            self._set(earliest)


class Deadline:
    __slots__ = ("_all", "_cancelling", "_error", "_expired", "_seconds", "_task", "at", "owner")

    def __init__(self, of: Deadlines, seconds: float, owner: Principal | None) -> None:
        self._all = of
        self._seconds = seconds
        self._expired = False
        self._error: TollhouseError | None = None  # with which it is ended
        self.owner = owner
        self.at = inf  # in the time of the event loop

    def __enter__(self) -> None:
        if self._all.ended and self.owner is not None:
            self._refuse_ended(self.owner)
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
            raise (self._error or TimeoutError()) from error

    def expire(self, error: TollhouseError | None = None) -> None:
        self._expired, self._error = True, error
        self._task.cancel()

    def _refuse_ended(self, owner: Principal) -> None:
        ended = self._all.ended.get(owner.key_id)
        if ended is not None:
            raise ended[1]


def shutting_down() -> TollhouseError:
    return Unavailable(
        "This gateway is shutting down.",
        next_step="Send the request again; only what was delivered is charged.",
        code="draining",
        retry_after_s=1.0,
    )


def deadline_exceeded() -> TollhouseError:
    return Unavailable(
        "The request exceeded its deadline.",
        next_step="Request fewer tokens, or allow more time with x-request-timeout-ms.",
        code="deadline_exceeded",
    )
