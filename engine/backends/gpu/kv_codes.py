# mypy: ignore-errors
"""Keys and values in 8 bits inside kernels: the formula of `quantization/kv.py`, by integer operations
alone where a device has no type of 8 bits (an A100)."""

import triton
import triton.language as tl

FLOATS = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)  # e4m3, as bytes


@triton.jit
def widen(codes, scale, kind: tl.constexpr, KIND: tl.constexpr):
    """Codes times their scales, in the type `kind`."""
    if KIND == INT8:
        value = codes.to(tl.float32)
    else:  # the bits of a float16 whose exponent is 8 too low, subnormal ones too
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return (value * scale).to(kind)


@triton.jit
def head_scale(largest, bad, KIND: tl.constexpr):
    """A head's scale in float32, of which only bfloat16's bits are set, never below `largest` over the
    greatest code; NaN where a value is `bad`."""
    greatest: tl.constexpr = 127.0 if KIND == INT8 else 448.0
    exact = tl.maximum(tl.math.div_rn(largest, greatest), 5.421010862427522e-20)  # 2^-64
    up = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    return tl.where(bad, float("nan"), up.to(tl.float32, bitcast=True))


@triton.jit
def encode(value, KIND: tl.constexpr):
    """The nearest codes of values within the codes' range, half to even."""
    if KIND == INT8:  # 1.5 * 2^23: the sum's last bit is 1
        code = ((value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
    else:
        bits = value.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        kept = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20  # three bits of the mantissa
        # Below 2^-6 codes are 2^-9 apart, as float32 is from 2^14 on.
        fixed = size.to(tl.float32, bitcast=True) + 16384.0
        small = fixed.to(tl.int32, bitcast=True) - 0x46800000
        magnitude = tl.where(size < 0x3C800000, small, kept - 960)  # exponents are 120 apart
        code = (magnitude | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code
