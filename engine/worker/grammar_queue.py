"""Requests whose grammar is being tried and compiled, in a thread of its own.

One grammar at a time, the tenants in turn: a tenant whose grammars take long delays its own requests.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from engine.errors import EngineError, RequestError
from engine.protocol import GenerateRequest, Grammar

_MOST_PER_TENANT = 64


@dataclass(slots=True)
class PendingRequest:
    gateway_id: str
    request: GenerateRequest
    error: EngineError | None = None
    aborted: bool = False


class GrammarQueue:
    """Call it from one thread only."""

    def __init__(self, prepare: Callable[[Grammar], object]) -> None:
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tenants: dict[str, deque[PendingRequest]] = {}  # in the order of their turns
        self._running: tuple[PendingRequest, Future[object]] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values())) + (self._running is not None)

    def add(self, gateway_id: str, request: GenerateRequest) -> None:
        """Raises RequestError where the tenant has too many."""
        queue = self._tenants.setdefault(request.namespace, deque())
        if len(queue) >= _MOST_PER_TENANT:
            raise RequestError(
                "tenant_queue_full",
                f"{len(queue)} requests of this tenant wait for their grammars: try later",
            )
        queue.append(PendingRequest(gateway_id, request))

    def find(self, gateway_id: str) -> list[PendingRequest]:
        """The gateway's requests."""
        found = [each for queue in self._tenants.values() for each in queue]
        found += [self._running[0]] if self._running is not None else []
        return [each for each in found if each.gateway_id == gateway_id]

    def take(self) -> PendingRequest | None:
        """A request whose grammar is done, if there is one; begins with the next."""
        done = None
        if self._running is not None:
            pending, future = self._running
            if not future.done():
                return None
            error = future.exception()
            if isinstance(error, EngineError):
                pending.error = error
            elif error is not None:
                pending.error = EngineError("internal", f"{type(error).__name__}: {error}")
            done, self._running = pending, None
        if self._tenants:
            tenant, queue = next(iter(self._tenants.items()))
            pending = queue.popleft()
            del self._tenants[tenant]
            if queue:
                self._tenants[tenant] = queue  # behind the others
            grammar = pending.request.sampling.grammar
            assert grammar is not None
            self._running = pending, self._thread.submit(self._prepare, grammar)
        return done

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
