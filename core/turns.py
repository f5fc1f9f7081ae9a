"""How busy the machine is, as this thread feels it."""

from pathlib import Path

_TOLD = Path("/proc/thread-self/schedstat")  # ns on a core, ns ready for one, turns


def waited_s() -> float:
    """How long the calling thread has been ready to run and waited for a core, all in all; always
    0 where the system does not tell."""
    try:
        return int(_TOLD.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
