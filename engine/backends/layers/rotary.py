"""Rotary position embedding: tables for all positions, and the rotation.

Scalings: linear, dynamic NTK, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753)
and Llama 3.1's by wavelength.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.model_spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosine and signed sine, each [positions, head_dim] in the model's dtype.

    The sine of the first half is negated, so that rotating is a roll by half a head, two products
    and a sum. In a step: a row for each token, as wide as all rotated heads.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False  # pairs are neighbours, not halves of a head
    part: int | None = None  # how many values of a head, its first ones, are rotated; None: all

    def among(self, rows: torch.Tensor | None, width: int) -> "RotaryTables":
        """Those of some tokens (None: of all), for the first heads, which have `width` values."""
        if rows is None:
            return replace(self, cos=self.cos[:, :width], sin=self.sin[:, :width])
        cos, sin = (each[:, :width].index_select(0, rows) for each in (self.cos, self.sin))
        return replace(self, cos=cos, sin=sin)


def rotary_tables(spec: ModelSpec, native: int, dtype: torch.dtype) -> list[RotaryTables]:
    """Tables of the served positions for each of `spec.ropes`; `native` is the context length in the
    checkpoint's config."""
    return [_tables(rope, spec, native, dtype) for rope in spec.ropes]


def _tables(rope: RopeSpec, spec: ModelSpec, native: int, dtype: torch.dtype) -> RotaryTables:
    dim, positions = spec.rotary_dim, spec.context
    steps = torch.arange(positions, dtype=torch.float32)
    if rope.kind == "dynamic":
        frequencies = _dynamic(rope, dim, native, steps)
        angles, factor = steps[:, None] * frequencies, 1.0
    else:
        inverse, factor = _inverse_frequencies(rope, dim, native, positions)
        angles = steps[:, None] * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if spec.interleaved:
        cos, sin = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)
        still = spec.head_dim - dim
        cos, sin = F.pad(cos.flatten(1), (still, 0), value=1.0), F.pad(sin.flatten(1), (still, 0))
        return RotaryTables(cos.to(dtype), sin.to(dtype), True)
    still = spec.head_dim - dim
    return RotaryTables(
        F.pad(torch.cat((cos, cos), -1), (0, still), value=1.0).to(dtype).contiguous(),
        F.pad(torch.cat((-sin, sin), -1), (0, still)).to(dtype).contiguous(),
        part=dim if still else None,
    )


def rotate_(x: torch.Tensor, angles: RotaryTables, head_dim: int) -> None:
    """Rotates heads in place. x and the angles: [tokens, heads * head_dim]."""
    other = rolled(x, angles, head_dim)
    x.mul_(angles.cos).addcmul_(other, angles.sin)


def rolled(x: torch.Tensor, angles: RotaryTables, head_dim: int) -> torch.Tensor:
    """The other value of each pair."""
    if angles.interleaved:
        return x.view(x.shape[0], -1, 2).flip(-1).flatten(1)
    heads, part = x.view(x.shape[0], -1, head_dim), angles.part
    if part is None:
        return heads.roll(head_dim // 2, -1).flatten(1)
    return torch.cat((heads[..., :part].roll(part // 2, -1), heads[..., part:]), -1).flatten(1)


def _plain(theta: float, dim: int) -> torch.Tensor:
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / torch.pow(theta, exponent)


def _inverse_frequencies(
    rope: RopeSpec, dim: int, native: int, positions: int
) -> tuple[torch.Tensor, float]:
    if rope.kind == "linear":
        return _plain(rope.theta, dim) / rope.values["factor"], 1.0
    if rope.kind == "divided":
        return _plain(rope.theta, dim) / torch.tensor(rope.values["divisors"]), 1.0
    if rope.kind == "longrope":
        return _longrope(rope, dim, native, positions)
    if rope.kind == "yarn":
        return _yarn(rope, dim, native)
    if rope.kind == "llama3":
        return _llama3(rope, dim, native), 1.0
    return _plain(rope.theta, dim), 1.0


def _longrope(rope: RopeSpec, dim: int, native: int, positions: int) -> tuple[torch.Tensor, float]:
    """The served context chooses the set of divisors: if the length of each sequence did, cached keys
    would be wrong for the sequences that grow past the original context."""
    values = rope.values
    original = values["original_max_position_embeddings"]
    divisors = values["long_factor" if positions > original else "short_factor"]
    factor = values.get("factor") or native / original
    attention = values.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _plain(rope.theta, dim) / torch.tensor(divisors), float(attention)


def _dynamic(rope: RopeSpec, dim: int, native: int, steps: torch.Tensor) -> torch.Tensor:
    """One set of frequencies per position: that of a sequence which ends there.

    A position's rotation then depends only on the position, so it is the same in chunks, cached
    prefixes and batches. Returns [positions, dim / 2].
    """
    factor = rope.values["factor"]
    length = (steps + 1).clamp(min=native).double()
    stretch = factor * length / native - (factor - 1)
    theta = rope.theta * torch.pow(stretch, dim / (dim - 2))
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequencies: torch.Tensor = 1.0 / torch.pow(theta[:, None], exponent)
    return frequencies.float()


def _llama3(rope: RopeSpec, dim: int, native: int) -> torch.Tensor:
    values = rope.values
    original = float(values.get("original_max_position_embeddings") or native)
    low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
    inverse = _plain(rope.theta, dim)
    turns = original * inverse / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: torch.Tensor = (1 - smooth) * inverse / float(values["factor"]) + smooth * inverse
    return scaled


def _yarn(rope: RopeSpec, dim: int, native: int) -> tuple[torch.Tensor, float]:
    values = rope.values
    original = values.get("original_max_position_embeddings") or native
    factor = values["factor"]

    def dim_of(rotations: float) -> float:
        turned = original / (rotations * 2 * math.pi)
        return dim * math.log(turned) / (2 * math.log(rope.theta))

    low, high = dim_of(values.get("beta_fast") or 32), dim_of(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = _plain(rope.theta, dim)
    return inverse / factor * ramp + inverse * (1 - ramp), _yarn_attention(values, factor)


def _yarn_attention(values: dict[str, float], factor: float) -> float:
    given = values.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(values["mscale"]) / mscale(values["mscale_all_dim"])
    return mscale(1.0)
