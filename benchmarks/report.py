"""How every benchmark reports: progress on stderr, one JSON object a figure on stdout."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


def figure(
    benchmark: str,
    value: float,
    unit: str,
    higher_is_better: bool,
    peer: str | None = None,
    peer_value: float | None = None,
    *,
    at_least: float | None = None,
    aim: float | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Print one figure, and return it. `score` is how many times better than the peer we are,
    whichever way the unit runs; `at_least` and `aim` are on the score, or without a peer on the
    value."""
    line = {
        "benchmark": benchmark,
        "value": _rounded(value),
        "unit": unit,
        "higher_is_better": higher_is_better,
        "peer": peer,
        "peer_value": None if peer_value is None else _rounded(peer_value),
        "score": score(value, peer_value, higher_is_better),
        "at_least": at_least,
        "aim": aim,
        "machine": machine(),
        "settings": settings or {},
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    return line


def progress(words: str) -> None:
    sys.stderr.write(words + "\n")
    sys.stderr.flush()


def score(value: float, peer_value: float | None, higher_is_better: bool) -> float | None:
    """None without a peer, or where the worse of the two is nothing at all."""
    if peer_value is None:
        return None
    better, worse = (value, peer_value) if higher_is_better else (peer_value, value)
    return None if worse == 0 else _rounded(better / worse)


@cache
def machine() -> dict[str, Any]:
    """What ran this: processor, its widest vectors, cores, memory, and the GPU if there is one."""
    return {
        "cpu": _cpu_name(),
        "vectors": _vectors(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": _gpu_name(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def processor_times() -> tuple[int, int]:
    """(all, stolen) in ticks since the start of the machine. What a host gives to others while this
    machine had work is stolen; where the system does not tell, nothing is."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    ticks = [int(each) for each in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks), ticks[7]


def stolen_since(before: tuple[int, int]) -> float:
    """Per cent of the processor since `processor_times` said so."""
    now = processor_times()
    return round(100 * (now[1] - before[1]) / max(1, now[0] - before[0]), 1)


def median_pair(
    ours: Sequence[float | None], theirs: Sequence[float | None]
) -> tuple[float, float | None] | None:
    """Both values of the round with the median ratio, where place n of each is round n; without
    theirs our median alone, and None without ours."""
    alone = sorted(each for each in ours if each is not None)
    if not alone:
        return None
    pairs = [
        (own, other)
        for own, other in zip(ours, theirs, strict=False)
        if own is not None and other is not None
    ]
    if not pairs:
        return alone[len(alone) // 2], None
    return sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _cpu_name() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _vectors() -> str | None:
    """Cloud machines that share a name differ in this, and products by a factor of four."""
    flags = _cpu_info("flags").split()
    return next(
        (each for each in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if each in flags), None
    )


def _cpu_info(name: str) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    values = [line.split(":", 1)[1].strip() for line in lines if line.startswith(name)]
    return values[0] if values else ""


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _gpu_name() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip().splitlines()[0] if ran.returncode == 0 and ran.stdout else None
