"""Threads for work that blocks, by kind, so that no kind waits for another.

`asyncio.to_thread` runs in threads of the default kind, the work of tenants' requests. What decides who
may do what, and the gateway's own upkeep, have threads of their own (`run_as`). In each pool a tenant
has half of the threads at most; the work that it has over that waits behind nobody else's.
"""

import asyncio
import contextvars
import enum
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from core.errors import RateLimited

T = TypeVar("T")
P = ParamSpec("P")
_QUEUE_RETRY_S = 5.0
# Whose request the current task serves; empty for the gateway's own work.
current_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("current_tenant", default="")


class Work(enum.Enum):
    """The kinds of work with threads of their own, and how many they have."""

    KEYS = "keys", 4  # look-ups of keys, sessions and rights
    REVOCATION = "revocation", 1  # reads what was revoked
    IDEMPOTENCY = "idempotency", 4
    UPLOADS = "uploads", 4  # reading, unpacking and storing what tenants send
    SIGN_ON = "sign-on", 4  # waits for an issuer of identities
    ERASURES = "erasures", 2  # read all that a tenant has stored; one of a tenant at a time
    EXPORTS = "exports", 2  # archives of all that a tenant has stored
    OWN = "own", 2  # refreshes what requests read from memory

    def __init__(self, label: str, threads: int) -> None:
        self.label = label
        self.threads = threads


class TenantThreads(ThreadPoolExecutor):
    """Begins work in turns by tenant, as `current_tenant` names it when the work is submitted."""

    def __init__(self, threads: int, thread_name_prefix: str) -> None:
        super().__init__(threads, thread_name_prefix)
        self._share = max(1, threads // 2)
        self._free = threads
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = (
            OrderedDict()
        )
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            queue = self._waiting.setdefault(current_tenant.get(), deque())
            queue.append((future, partial(work, *args, **named)))
            self._begin()
        return future

    def pending(self, tenant: str) -> int:
        """How much work of the tenant runs or waits."""
        with self._changed:
            return self._running[tenant] + len(self._waiting.get(tenant, ()))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._closed = True
            if cancel_futures:
                for queue in self._waiting.values():
                    for future, _ in queue:
                        future.cancel()
                self._waiting.clear()
            if wait:
                self._changed.wait_for(lambda: not self._waiting)
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _begin(self) -> None:
        """As much as there are threads for. Called with the lock."""
        while self._free and (tenant := self._next()) is not None:
            queue = self._waiting[tenant]
            future, work = queue.popleft()
            self._waiting.move_to_end(tenant)
            if not queue:
                del self._waiting[tenant]
            self._free -= 1
            self._running[tenant] += 1
            super().submit(self._run, tenant, future, work)

    def _next(self) -> str | None:
        for tenant in self._waiting:
            if not tenant or self._running[tenant] < self._share:
                return tenant
        return None

    def _run(self, tenant: str, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
        finally:
            with self._changed:
                self._free += 1
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                self._begin()
                self._changed.notify_all()


_pools: dict[Work, TenantThreads] = {}


def _pool(work: Work) -> TenantThreads:
    """Of the process; it starts its threads when they are needed."""
    pool = _pools.get(work)
    if pool is None:
        pool = _pools[work] = TenantThreads(work.threads, f"tollhouse-{work.label}")
    return pool


async def run_as(kind: Work, work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
    """As `asyncio.to_thread`, in the threads of the kind. Call it on the event loop."""
    context = contextvars.copy_context()
    call = partial(context.run, work, *args, **named)
    return await asyncio.get_running_loop().run_in_executor(_pool(kind), call)


async def run_queued(kind: Work, tenant: str, most: int, work: Callable[[], T]) -> T:
    """As `run_as`, for long work of which a tenant may have `most` running and waiting in this process.
    RateLimited beyond that. What has begun goes on when its caller leaves."""
    if _pool(kind).pending(tenant) >= most:
        raise RateLimited(
            f"{most} {kind.label} of the organisation are running or waiting, the maximum.",
            next_step="Send this one again when they have ended.",
            code=f"too_many_{kind.label}",
            retry_after_s=_QUEUE_RETRY_S,
        )
    token = current_tenant.set(tenant)
    try:
        return await run_as(kind, work)
    finally:
        current_tenant.reset(token)


async def run_in_thread(work: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, but a cancelled caller waits for the end of the work, so that nothing
    that it does next runs concurrently. For work of less than about a second."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise
