# mypy: ignore-errors
"""Programmatic dependent launch: from Hopper on a kernel starts while the one before it ends, so that a
launch costs less of the time in which nothing is read."""

import triton
import triton.language as tl

from engine.backends.gpu.launch import capability

HOPPER = 90
LINE = tl.constexpr(128)  # bytes that a prefetch reads


@triton.jit
def wait_for_last_launch(OVERLAP: tl.constexpr):
    """Waits until the last launch, and with it every one before, has ended. Each program calls it
    before it reads or writes what any other launch writes or reads: only weights may be read earlier.
    The next launch waits in the same way, so it may start as soon as all programs of this one have."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(rows, AHEAD: tl.constexpr, OVERLAP: tl.constexpr):
    """Reads the first AHEAD elements of each row of a weight, at the pointers `rows` [1, count],
    into L2."""
    if OVERLAP:
        step: tl.constexpr = LINE * 8 // rows.dtype.element_ty.primitive_bitwidth
        places = rows + (tl.arange(0, AHEAD // step) * step)[:, None]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def overlapped() -> dict[str, bool]:
    """What a launch of a kernel with OVERLAP takes: the flag, and the attribute of the launch."""
    able = not triton.knobs.runtime.interpret and capability() >= HOPPER
    return {"OVERLAP": able, "launch_pdl": able}
