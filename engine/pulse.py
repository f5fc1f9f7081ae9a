"""When the other side was heard of, and whether it has been quiet for longer than it used to be."""

import time

# Silence past so many of the longest pauses lately, and past so many seconds, is unusual.
_USUAL_PAUSES, _LEAST_SILENCE_S = 2.5, 1.5
_FORGET = 0.9  # of the longest pause, with every message


class Pulse:
    """Times are of `time.monotonic`, in seconds."""

    def __init__(self, expected_s: float = 1.0) -> None:
        """`expected_s`: between two messages, until a longer pause was seen."""
        self.heard_at = 0.0
        self.output_at = 0.0  # tokens for whomever
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
