"""Timing on a GPU: by its own events, with the cache flushed, and sections that keep to a budget."""

import signal
import statistics
import time
from collections.abc import Callable
from types import FrameType

import torch

from benchmarks.gpu.figures import say

_FLUSHED = 256 << 20  # bytes: more than any second-level cache


def median_ms(function: Callable[[], object], seconds: float = 0.4) -> float:
    """Median time of one call in milliseconds; what it reads is not in the cache before."""
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - start, 1e-5)
    repeats = max(5, min(100, int(seconds / (once + 2e-4))))
    flush = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        # Half a millisecond in which the host gets ahead.
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        begin, end = _event(), _event()
        begin.record()
        function()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in times))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class OverBudget(Exception):
    """A section took longer than it may."""


def run_section(name: str, seconds: float, deadline: float, body: Callable[[], object]) -> bool:
    """Runs the body for at most that long. A failure is told, and the next section goes on."""
    allowed = int(min(seconds, deadline - time.monotonic()))
    if allowed < 5:
        say(f"{name}: left out, the time is up")
        return False
    say(f"{name} (at most {allowed} s)")
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(allowed)
    start = time.monotonic()
    try:
        body()
    except Exception as error:
        say(f"{name}: failed, {type(error).__name__}: {error}")
        return False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        torch.cuda.empty_cache()
    say(f"{name}: {time.monotonic() - start:.1f} s")
    return True


def _ring(number: int, frame: FrameType | None) -> None:
    raise OverBudget("over its time")
