"""Bytes that weights and cached values take, and in which type a device multiplies them."""

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.planning.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter by its place, scales of quantised blocks included."""

    name: str
    attention: float
    dense: float  # MLPs that every token uses, and shared experts
    expert: float
    multiplied_in: str  # bf16, fp8 or fp4: whose peak bounds the products
    table: float = 2.0  # embeddings and the product of the logits

    def weight_bytes(self, shape: ModelShape) -> float:
        tables = shape.head if shape.tied else 2 * shape.head
        return (
            self.attention * shape.attention
            + self.dense * shape.dense
            + self.expert * shape.expert_weights
            + self.table * tables
        )


_FP8 = 1.0 + 4 / 128**2  # a float32 scale for a block of 128 × 128
_NVFP4 = 0.5 + 1 / 16  # an 8-bit scale for 16 values
_MXFP4 = 0.5 + 1 / 32  # an 8-bit exponent for 32 values
_INT4 = 0.5 + 2 / 128  # a 16-bit scale for 128 values
_INT8 = 1.0 + 2 / 128
PRECISIONS = {
    each.name: each
    for each in (
        Precision("float32", 4.0, 4.0, 4.0, "bf16", table=4.0),
        Precision("bf16", 2.0, 2.0, 2.0, "bf16"),
        Precision("fp8", _FP8, _FP8, _FP8, "fp8"),
        Precision("int8", _INT8, _INT8, _INT8, "int8"),
        Precision("fp4", _NVFP4, _NVFP4, _NVFP4, "fp4"),
        # Mixtures whose experts alone are rounded to 4 bits, as gpt-oss and Kimi K2.5 are published.
        Precision("mxfp4", 2.0, 2.0, _MXFP4, "bf16"),
        Precision("int4", _INT4, _INT4, _INT4, "bf16"),
        Precision("int4-experts", 2.0, 2.0, _INT4, "bf16"),
    )
}
KV_BYTES = {
    "float32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0 + 4 / 64,
    "fp4": _NVFP4,
}


def precision(name: str) -> Precision:
    found = PRECISIONS.get(name)
    if found is None:
        raise ConfigError(f"quantization is {name!r}: use one of {', '.join(PRECISIONS)}")
    return found


def kv_bytes(name: str) -> float:
    """Bytes of a cached value."""
    found = KV_BYTES.get(name)
    if found is None:
        raise ConfigError(f"kv_dtype is {name!r}: use one of {', '.join(KV_BYTES)}")
    return found
