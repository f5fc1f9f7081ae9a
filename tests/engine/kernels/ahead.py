"""Compile what a piece of code launches for an H200 (sm_90) without one: Triton's own front and
back end and NVIDIA's assembler run here, only the launch itself is left out."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Compiled:
    name: str
    shared: int  # bytes of shared memory; an H200 has 227 KiB a program
    registers: int
    stack: int  # bytes of local memory a thread: above 0 it spills or indexes arrays
    tensor_cores: bool


class AbsentDriver:
    """Answers what Triton asks of a device before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

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
    uses_mma = "mma.sync" in ptx or "wgmma" in ptx
    return Compiled(
        kernel.metadata.name, kernel.metadata.shared, counts.REG, counts.STACK, uses_mma
    )
