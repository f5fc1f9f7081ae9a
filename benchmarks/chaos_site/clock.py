"""The site's clock: hours pass between two rounds, so that days close and months are invoiced.

libfaketime (Debian's package `faketime`) gives every process of the site the shift that a file holds.
Time-outs are measured by the monotonic clock, which stays as it is.
"""

from datetime import datetime, timedelta
from pathlib import Path

from core.clock import SystemClock

_LIBRARIES = "/usr/lib/*/faketime/libfaketimeMT.so.1"


class ShiftedClock(SystemClock):
    """The clock that the site's processes read, for the process that plays the rounds."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock-shift"
        self._library = next(iter(sorted(Path("/").glob(_LIBRARIES.lstrip("/")))), None)
        self._shift = timedelta(0)
        self.advance(0)

    @property
    def can_shift(self) -> bool:
        return self._library is not None

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to read this clock."""
        if self._library is None:
            return {}
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def now(self) -> datetime:
        return super().now() + self._shift

    def advance(self, hours: float) -> None:
        """For all processes within a second. Nothing where libfaketime is not installed."""
        if self.can_shift:
            self._shift += timedelta(hours=hours)
        self._file.write_text(f"+{int(self._shift.total_seconds())}\n")
