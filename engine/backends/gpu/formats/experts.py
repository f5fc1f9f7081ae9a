# mypy: ignore-errors
"""Around the products of experts: the clamped gate, and the sum of each token's choices."""

import triton
import triton.language as tl


@triton.jit
def clamped_kernel(out, gate_up, stride, alpha, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out = gate * sigmoid(alpha * gate) * (up + 1), both within the limit, as gpt-oss was trained."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < WIDTH
    gate = tl.load(gate_up + row * stride + cols, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + cols, mask=ok, other=0.0).to(tl.float32)
    # Comparisons keep what is not a number, which minimum and maximum would lose.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    result = gate / (1.0 + tl.exp(tl.minimum(-gate * alpha, 80.0))) * (up + 1.0)
    result = tl.where(gate == gate, result, gate)
    tl.store(out + row * WIDTH + cols, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def sum_choices_kernel(
    out, found, shares, chosen, places, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum over its choices, in order, of share * found[place of the choice]. A choice
    of no expert (a graph's padding) adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(ACTIVE):
        choice = token * ACTIVE + rank
        expert = tl.load(chosen + choice)
        place = tl.load(places + choice).to(tl.int64)
        ok = (cols < WIDTH) & (expert < EXPERTS)
        value = tl.load(found + place * WIDTH + cols, mask=ok, other=0.0).to(tl.float32)
        acc += tl.where(expert < EXPERTS, tl.load(shares + choice).to(tl.float32), 0.0) * value
    tl.store(out + token * WIDTH + cols, acc.to(out.dtype.element_ty), mask=cols < WIDTH)
