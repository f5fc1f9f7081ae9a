# mypy: ignore-errors
"""The end of both products: factors, bias and the outputs of the rows."""

import triton
import triton.language as tl


@triton.jit
def finish(
    acc, factors, bias, out, row, row_ok, outputs, out_ok, out_stride,
    FACTORS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Stores acc [outputs, rows], float32, times a factor an output, plus its bias."""
    if FACTORS:
        acc *= tl.load(factors + outputs, mask=out_ok, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + outputs, mask=out_ok, other=0.0)[:, None]
    target = out + row.to(tl.int64)[None, :] * out_stride + outputs[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=out_ok[:, None] & row_ok[None, :])
