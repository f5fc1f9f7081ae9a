"""A circuit breaker: after repeated failures a replica gets no requests, then a single probe."""

from collections import deque
from enum import StrEnum

from core.clock import Clock


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED = State.CLOSED


class Breaker:
    """Opens after `failures` failures within `window_s`. A failed probe doubles the pause, to a cap."""

    def __init__(
        self,
        clock: Clock,
        *,
        failures: int = 3,
        window_s: float = 10.0,
        pause_s: float = 1.0,
        longest_pause_s: float = 60.0,
    ) -> None:
        self._clock = clock
        self._limit = failures
        self._window_s = window_s
        self._first_pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._pause_s = pause_s
        self._failed: deque[float] = deque()
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> State:
        if self._opened_at is None:
            return _CLOSED
        waited = self._clock.monotonic() - self._opened_at
        return State.HALF_OPEN if waited >= self._pause_s else State.OPEN

    def allows(self) -> bool:
        """Whether a request may be sent. Half open, only one may be in progress."""
        if self._opened_at is None:
            return True
        state = self.state
        return state is State.CLOSED or (state is State.HALF_OPEN and not self._probing)

    def sent(self) -> None:
        self._probing = self._opened_at is not None and self.state is State.HALF_OPEN

    def succeeded(self) -> bool:
        """Whether it was open until now."""
        was_open = self._opened_at is not None
        self._failed.clear()
        self._opened_at = None
        self._probing = False
        self._pause_s = self._first_pause_s
        return was_open

    def released(self) -> None:
        """The request ended without a verdict on the replica, for example because the client left."""
        self._probing = False

    def failed(self) -> None:
        now = self._clock.monotonic()
        if self._opened_at is not None:
            if self.state is State.HALF_OPEN:
                self._pause_s = min(self._longest_pause_s, self._pause_s * 2)
                self._opened_at = now
            self._probing = False
            return
        self._failed.append(now)
        while self._failed[0] < now - self._window_s:
            self._failed.popleft()
        if len(self._failed) >= self._limit:
            self._failed.clear()
            self._opened_at = now

    def trip(self) -> None:
        """Open at once, since every request to a hanging replica waits for a timeout."""
        if self._opened_at is None:
            self._failed.clear()
            self._opened_at = self._clock.monotonic()
        else:
            self.failed()

    def retry_after_s(self) -> float:
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self._pause_s - self._clock.monotonic())
