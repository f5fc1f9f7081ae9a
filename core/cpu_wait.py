"""CPU contention, measured on the calling thread."""

from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # ns running, ns runnable but waiting, time slices


def cpu_wait_s() -> float:
    """Total seconds for which the calling thread was runnable but waited for a CPU. 0 if the
    system does not report it."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
