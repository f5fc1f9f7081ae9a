"""The engine on one GPU, in three calls of at most eight minutes: `--check-only` compares every kernel
with its reference, `--only attention,small,throughput,transformers` and `--only
large,formats,experts,latent` measure. Needs torch, triton, numpy, safetensors and tokenizers;
`transformers` is a peer where it is installed. `--toy` runs everything at sizes that mean nothing, to see
that it runs."""

import argparse
import sys
import time

import torch

from benchmarks.report import machine
from benchmarks.report import progress as say

SECONDS = 460.0  # of a call


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_gpu", description=__doc__)
    parser.add_argument("--check", action="store_true", help="first try every kernel on the device")
    parser.add_argument(
        "--check-only", action="store_true", help="try the kernels, measure nothing"
    )
    parser.add_argument(
        "--only", help="sections by name, comma-separated; `tune` runs only when named"
    )
    parser.add_argument("--toy", action="store_true", help="sizes that take no time")
    chosen = parser.parse_args(arguments)
    if not has_device():
        say("engine_gpu: torch sees no CUDA device, so there is nothing to measure. Run it on a "
            "machine with an NVIDIA GPU; on this one `pytest tests/engine/gpu` proves the "
            "kernels in Triton's interpreter.")  # fmt: skip
        return 1
    say(f"{machine()['gpu']}, torch {torch.__version__}")
    torch.manual_seed(0)
    good, deadline = True, time.monotonic() + SECONDS
    if chosen.check or chosen.check_only:
        from benchmarks.gpu.check import check_all

        good = check_all(deadline)
    if not chosen.check_only:
        names = set(chosen.only.split(",")) if chosen.only else None
        good &= _measure(names, deadline, toy=chosen.toy)
    return 0 if good else 1


def has_device() -> bool:
    return torch.cuda.is_available()


def _measure(names: set[str] | None, deadline: float, *, toy: bool) -> bool:
    from benchmarks.gpu.figures import say_table
    from benchmarks.gpu.sections import bodies
    from benchmarks.gpu.sizes import TOY, Sizes
    from benchmarks.gpu.timing import run_section

    good = True
    for name, seconds, body in bodies(names, TOY if toy else Sizes()):
        good &= run_section(name, seconds, deadline, body)
    say_table()
    return good


if __name__ == "__main__":
    sys.exit(main())
