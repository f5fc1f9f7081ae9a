"""Compile what a piece of code launches for a GPU without one: Triton's own front and back end and
NVIDIA's assembler run here, only the launch itself is left out. The argument is the GPU's compute
capability: 80, 90 or 100."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.kernels import attention_launch, lora_launch, pointwise_launch, skinny_launch
from engine.kernels.attention_reference import AttentionStep
from engine.kernels.lora_reference import LoraSite, LoraStep
from engine.kernels.pointwise_reference import RotaryStep
from engine.layers.norm import RmsNorm
from engine.model_spec import AttentionShape

TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)


@dataclass(frozen=True)
class Compiled:
    name: str
    shared: int  # bytes of shared memory
    registers: int
    stack: int  # bytes of local memory a thread: above 0 it spills or indexes arrays
    tensor_cores: bool


class AbsentDriver:
    """Answers what Triton asks of a device before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Every kernel launched inside is compiled instead; the list fills with what came out."""
    found: list[Compiled] = []
    triton.runtime.driver.set_active(AbsentDriver())  # type: ignore[arg-type]
    original = JITFunction.__getitem__

    def instead(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            found.append(_inspect(self.warmup(*args, grid=grid, **kwargs)))

        return launch

    JITFunction.__getitem__ = instead
    try:
        yield found
    finally:
        JITFunction.__getitem__ = original


def _inspect(kernel: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    counts = SimpleNamespace(**{k: int(v) for k, v in re.findall(r"(REG|STACK):(\d+)", usage)})
    ptx = kernel.asm["ptx"]
    uses_mma = "mma.sync" in ptx or "wgmma" in ptx or "tcgen05.mma" in ptx
    return Compiled(
        kernel.metadata.name, kernel.metadata.shared, counts.REG, counts.STACK, uses_mma
    )


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def attention(heads: int, kv_heads: int, dim: int, decodes: int, splits: int, **shape: Any) -> None:
    cache = halves(8, 2 * kv_heads, 16, dim)
    step = AttentionStep(ints(4, 64), ints(4), ints(4), ints(5), decodes)
    kind = AttentionShape(0.1, **shape)
    q = halves(32, heads, dim)
    attention_launch.paged_attention(q, cache, step, kind, splits=splits)


def lora(tokens: int, inputs: int, widths: list[int], max_rank: int, chunk_rows: int) -> None:
    slices = len(widths)
    table = ints(4, slices, 2, max_rank)
    site = LoraSite(table, ints(4, slices), ints(slices, 2), inputs, max(widths))
    step = LoraStep(ints(tokens), ints(8, 3), chunk_rows, max_rank)
    lora_launch.add_lora(
        halves(tokens, sum(widths)), halves(tokens, inputs), halves(64), site, step
    )


def pointwise() -> None:
    x = halves(4, 4096)
    pointwise_launch.rms_norm(x, RmsNorm(x[0], 1e-5), x.clone())
    cache, angles, norm = halves(4, 16, 16, 128), torch.zeros(64, 128), RmsNorm(halves(128), 1e-6)
    step = RotaryStep(ints(4), ints(4))
    pointwise_launch.rotary(halves(4, 48 * 128), cache, step, angles, (norm, norm))
    pointwise_launch.gated(halves(4, 2 * 14336))


def skinny() -> None:
    x, norm, first = halves(1, 4096), RmsNorm(halves(4096), 1e-5), skinny_launch.CANDIDATES[0]
    for tiles in skinny_launch.CANDIDATES:
        skinny_launch.skinny_linear(
            x, halves(512, 4096), tiles, bias=halves(512), norm=norm, gate="silu"
        )
    skinny_launch.skinny_linear(x, halves(4096, 4096), first, add_to=halves(1, 4096))


if __name__ == "__main__":
    with compiling() as kernels:
        attention(32, 8, 128, decodes=4, splits=8)
        attention(32, 8, 128, decodes=0, splits=1)
        attention(8, 4, 256, decodes=0, splits=1, window=4096, softcap=50.0)
        attention(14, 2, 64, decodes=4, splits=1)
        attention(32, 32, 96, decodes=0, splits=1)
        lora(32, 4096, [4096, 1024, 1024], max_rank=16, chunk_rows=16)
        lora(1024, 14336, [4096], max_rank=256, chunk_rows=64)
        lora(32, 1024, [3072, 3072], max_rank=64, chunk_rows=16)
        pointwise()
        skinny()
    print("\n".join(json.dumps(asdict(kernel)) for kernel in kernels))  # noqa: T201
