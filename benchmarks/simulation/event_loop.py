"""An event loop on a fake clock: a timer moves the clock instead of waiting, and work for threads runs
in the caller, so that a run replays exactly.
"""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from core.clock import FakeClock

_SHORTEST_S = 1e-5  # the clock counts microseconds


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__(_ClockSelector(clock))
        self._clock = clock
        self.set_default_executor(_Inline(1))

    def time(self) -> float:
        return self._clock.monotonic()

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        """Whatever the pool: it runs at once."""
        return super().run_in_executor(None, func, *args)


class _ClockSelector(selectors.SelectSelector):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("the simulated process waits for something that never comes")
        self._clock.advance(max(timeout, _SHORTEST_S))
        return ready


class _Inline(ThreadPoolExecutor):
    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **options))
        except BaseException as error:
            done.set_exception(error)
        return done
