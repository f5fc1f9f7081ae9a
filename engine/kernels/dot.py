# mypy: ignore-errors
"""The matrix product that the kernels share."""

import triton
import triton.language as tl

# Triton's interpreter multiplies the bits of bfloat16 as if they were integers, so there (and only
# there) the operands are widened first; the products of two bfloat16 are exact in float32.
WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. `PRECISION` matters for float32 operands only: "ieee" or "tf32"."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)
