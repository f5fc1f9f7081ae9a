"""What the device gives at most: bytes moved and products done per second, measured first."""

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.figures import figure
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import median_ms


@dataclass
class Ceilings:
    copy: float = 0.0  # bytes a second, read and written ones counted
    matmul: float = 0.0  # bfloat16 operations a second


def measure(ceilings: Ceilings, sizes: Sizes) -> None:
    """Fills in the record."""
    source = torch.randn(sizes.copied, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    ms = median_ms(partial(target.copy_, source))
    ceilings.copy = 2 * source.nbytes / ms * 1e3
    del source, target
    size = sizes.matmul
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ms = median_ms(lambda: a @ b)
    ceilings.matmul = 2 * size**3 / ms * 1e3
    figure("gpu_copy", ceilings.copy / 1e12, "TB/s", settings={"bytes": 4 * sizes.copied})
    figure(
        "gpu_matmul", ceilings.matmul / 1e12, "TFLOP/s", settings={"size": size, "dtype": "bf16"}
    )
