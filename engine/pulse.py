"""When the peer's last message arrived, and whether it has been silent for unusually long."""

import time

# Silence is unusual when it exceeds both this multiple of the longest recent pause and this time.
_USUAL_PAUSES, _LEAST_SILENCE_S = 2.5, 1.5
_FORGET = 0.9  # decay of the longest pause with every message


class Pulse:
    """Times are of `time.monotonic`, in seconds."""

    def __init__(self, expected_s: float = 1.0) -> None:
        """`expected_s`: the assumed pause between two messages until a longer one is observed."""
        self.heard_at = 0.0
        self.output_at = 0.0  # when the last StepOutput, of any request, arrived
        self._pause_s = expected_s

    def begin(self) -> None:
        self.heard_at = time.monotonic()

    def heard(self, *, output: bool) -> None:
        now = time.monotonic()
        self._pause_s = max(now - self.heard_at, _FORGET * self._pause_s)
        self.heard_at = now
        if output:
            self.output_at = now

    @property
    def quiet_s(self) -> float:
        return time.monotonic() - self.heard_at

    @property
    def silent(self) -> bool:
        return self.quiet_s > max(_LEAST_SILENCE_S, _USUAL_PAUSES * self._pause_s)
