"""The engine on one GPU, in one call under eight minutes: ceilings, attention, decoding, adapters,
throughput, quantised weights, experts. Needs torch, triton, numpy, safetensors and tokenizers;
`transformers` is a peer where it is installed. `--check` compares every kernel with its reference
first."""

import argparse
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.report import machine
from benchmarks.report import progress as say

SECONDS = 460.0
CHECK_SECONDS = 240.0


@dataclass
class State:
    """What one section leaves for the next."""

    ceilings: Any = None
    made: dict[str, Any] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_gpu", description=__doc__)
    parser.add_argument("--check", action="store_true", help="first try every kernel on the device")
    parser.add_argument(
        "--check-only", action="store_true", help="try the kernels, measure nothing"
    )
    parser.add_argument(
        "--only", help="sections by name, comma-separated; `tune` runs only when named"
    )
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        say("engine_gpu: torch sees no CUDA device, so there is nothing to measure. Run it on a "
            "machine with an NVIDIA GPU; on this one `pytest tests/engine/kernels` proves the "
            "kernels in Triton's interpreter.")  # fmt: skip
        return 1
    say(f"{machine()['gpu']}, torch {torch.__version__}")
    torch.manual_seed(0)
    good = True
    if chosen.check or chosen.check_only:
        from benchmarks.gpu.check import check_all

        good = check_all(time.monotonic() + CHECK_SECONDS)
    if not chosen.check_only:
        names = set(chosen.only.split(",")) if chosen.only else None
        good &= _measure(names)
    return 0 if good else 1


def _measure(names: set[str] | None) -> bool:
    from benchmarks.gpu.figures import say_table
    from benchmarks.gpu.sections import OPTIONAL, SECTIONS
    from benchmarks.gpu.timing import run_section

    deadline = time.monotonic() + SECONDS
    state = State()
    good = True
    for name, seconds, body in SECTIONS:
        wanted = name not in OPTIONAL if names is None else name in names or name == "ceilings"
        if wanted:
            good &= run_section(name, seconds, deadline, partial(body, state))
    say_table()
    return good


if __name__ == "__main__":
    sys.exit(main())
