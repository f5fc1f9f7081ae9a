"""Where benchmarks keep what they make: outside the repository, and for the next run."""

import os
from pathlib import Path


def home() -> Path:
    path = os.environ.get("TOLLHOUSE_BENCH_HOME", "~/.cache/tollhouse-bench")
    return Path(path).expanduser()
