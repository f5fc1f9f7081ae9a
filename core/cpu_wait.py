"""CPU contention: of the calling thread, and of the machine or container."""

from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # ns running, ns runnable but waiting, time slices
# Linux's pressure stall information; its first line ends with the microseconds in total.
_PRESSURE = Path("/proc/pressure/cpu")


def cpu_wait_s() -> float:
    """Total seconds for which the calling thread was runnable but waited for a CPU. 0 if the
    system does not report it."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def cpu_pressure_s() -> float:
    """Total seconds for which any task of the machine was runnable but waited for a CPU. 0 if the
    system does not report it."""
    try:
        some = _PRESSURE.read_bytes().partition(b"\n")[0]
        return int(some.rpartition(b"total=")[2]) / 1e6
    except (OSError, ValueError):
        return 0.0
