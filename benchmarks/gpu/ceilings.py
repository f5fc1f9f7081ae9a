"""What the device gives at most: bytes moved and products done per second, measured first."""

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.figures import figure
from benchmarks.gpu.timing import median_ms


@dataclass
class Ceilings:
    copy: float = 0.0  # bytes a second, read and written ones counted
    matmul: float = 0.0  # bfloat16 operations a second


def measure(ceilings: Ceilings) -> None:
    """Fills in the record."""
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    ms = median_ms(partial(target.copy_, source))
    ceilings.copy = 2 * source.nbytes / ms * 1e3
    del source, target
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ms = median_ms(lambda: a @ b)
    ceilings.matmul = 2 * 8192**3 / ms * 1e3
    figure("gpu_copy", ceilings.copy / 1e12, "TB/s", settings={"bytes": 4 << 30})
    figure(
        "gpu_matmul", ceilings.matmul / 1e12, "TFLOP/s", settings={"size": 8192, "dtype": "bf16"}
    )
