"""Ends an engine whose loop hangs, so that its supervisor starts another one.

Python's own threads cannot: a call that holds the interpreter's lock stops them too. The timer of
`faulthandler` needs no lock. It writes where every thread is, then ends the process.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

BEAT_S = 1.0
BLOCKED_S = 15.0  # without a turn of this thread, because another one keeps the interpreter's lock


class Watchdog:
    """Call it from a process of its own: it ends the process. `last_turn` is when the loop last went
    round, by `time.monotonic`; a turn longer than `stall_s` is a hang, with 0 none is."""

    def __init__(
        self,
        last_turn: Callable[[], float],
        stall_s: float,
        *,
        report: bool = False,
        blocked_s: float = BLOCKED_S,
    ) -> None:
        """`report`: also say on standard output, each second, that the process lives."""
        self._last_turn = last_turn
        self._stall_s = stall_s
        self._report = report
        self._blocked_s = blocked_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while True:
            late_s = time.monotonic() - self._last_turn()
            if not self._stall_s or late_s < self._stall_s:
                faulthandler.dump_traceback_later(self._blocked_s, exit=True)
            if self._report:
                try:
                    sys.stdout.write('{"event": "alive"}\n')
                    sys.stdout.flush()
                except OSError:  # who read it is gone
                    self._report = False
            if self._stop.wait(BEAT_S):
                return
