"""Ends a process with all that it started, also where it was cut off and could not end them itself."""

import os
import signal
import subprocess
import time
from contextlib import suppress

_GRACE_S = 20.0


def end(leader: "subprocess.Popen[bytes]", grace_s: float = _GRACE_S) -> None:
    """`leader` was started with `start_new_session`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, number)
        until = time.monotonic() + grace_s
        while time.monotonic() < until:
            leader.poll()  # a process that has ended stays in the group until it is read
            try:
                os.killpg(leader.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
