"""When the peer's last message arrived, and whether it has been silent for unusually long."""

import time

# Silence is unusual when it exceeds both this multiple of the longest recent pause and this time.
_PAUSE_MULTIPLE, _MIN_SILENCE_S = 2.5, 1.5
_PAUSE_DECAY = 0.9  # decay of the longest pause with every message


class Liveness:
    """Times are of `time.monotonic`, in seconds."""

    def __init__(self, expected_s: float = 1.0) -> None:
        """`expected_s`: the assumed pause between two messages until a longer one is observed."""
        self.received_at = 0.0
        self.output_at = 0.0  # when the last StepOutput, of any request, arrived
        self._pause_s = expected_s

    def start(self) -> None:
        """Start, or restart after a time in which nothing was read."""
        self.received_at = time.monotonic()

    def received(self, *, output: bool) -> None:
        now = time.monotonic()
        self._pause_s = max(now - self.received_at, _PAUSE_DECAY * self._pause_s)
        self.received_at = now
        if output:
            self.output_at = now

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self.received_at

    @property
    def silent(self) -> bool:
        return self.silence_s > max(_MIN_SILENCE_S, _PAUSE_MULTIPLE * self._pause_s)
