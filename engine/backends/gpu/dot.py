# mypy: ignore-errors
"""The matrix product that the kernels share."""

import triton
import triton.language as tl

# Triton's interpreter multiplies the bits of bfloat16 as integers, so only there the operands are
# widened first; the product of two bfloat16 values is exact in float32.
WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. `PRECISION` ("ieee" or "tf32") matters only for float32 operands."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)
