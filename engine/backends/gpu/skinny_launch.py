"""Launches the linear for few rows, and its reference in plain torch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.gpu.adapters.lora_launch import rank_tile
from engine.backends.gpu.adapters.lora_reference import lora_reference
from engine.backends.gpu.adapters.skinny_lora_launch import (
    REGISTERS,
    Change,
    grouped_chunks,
    inputs_tile,
)
from engine.backends.gpu.launch import MAX_ROWS, precision
from engine.backends.gpu.overlap import overlapped
from engine.backends.gpu.pointwise_reference import RotaryStep, gated_reference, rms_norm_reference
from engine.backends.gpu.skinny import skinny_kernel
from engine.backends.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    outputs: int  # outputs in a program
    inputs: int  # inputs in one iteration of its loop
    warps: int
    stages: int
    parts: int = 1  # programs that share the inputs of a tile, where they are many


# Measured on the GPU at start-up; the fastest is used. Small tiles occupy all multiprocessors when
# a layer has few outputs, parts do so when its inputs are many, large tiles keep more bytes in flight.
CANDIDATES = (
    SkinnyTiles(16, 256, 4, 4),
    SkinnyTiles(32, 128, 4, 5),
    SkinnyTiles(64, 128, 4, 4),
    SkinnyTiles(16, 256, 4, 4, parts=2),
)
MANY_INPUTS = 4096  # with fewer, to add the parts (about 1.7 µs) costs more than they save


@dataclass(frozen=True, slots=True)
class Rotation:
    """Where the queries, keys and values of a step go, as `pointwise_launch.rotary` puts them."""

    step: RotaryStep
    angles: Tensor  # [positions, head_dim] float32: cosines of each pair, then sines
    kv: Tensor  # [blocks, key heads and then value heads, block size, head_dim] floats


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    tiles: SkinnyTiles,
    *,
    bias: Tensor | None = None,
    norm: RmsNorm | None = None,
    gate: str = "",
    add_to: Tensor | None = None,
    out: Tensor | None = None,
    expand: Change | None = None,
    shrink: Change | None = None,
    rotate: Rotation | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """gate(norm(x) W^T + bias), written to `out` or added to `add_to` if given. `x` is [rows,
    inputs] with at most 16 rows, `weight` [outputs, inputs]; with a gate ("silu", "gelu") it
    and the bias hold the gate's rows followed by those of the up part. `expand`: what adapters add before
    the gate, its rows shrunk by now; `shrink` gets the shrunk rows of an `x` without a norm. With
    `rotate` outputs are queries, keys and values: the former are returned, [rows, heads * head_dim],
    rotated by pairs of a head's halves. `arrived` [tiles] int32 zeros, which they are again afterwards:
    many inputs may be shared by several programs; without it they are not."""
    rows, inputs = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"x has {rows} rows: at most {MAX_ROWS} are supported")
    outputs = weight.shape[0] // 2 if gate or rotate else weight.shape[0]
    width = outputs if rotate is None else weight.shape[0] - rotate.kv.shape[1] * rotate.kv.shape[3]
    out = add_to if add_to is not None else out
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    change, lora = expand or shrink, "expand" if expand else "shrink" if shrink else ""
    parts = tiles.parts if arrived is not None and inputs >= MANY_INPUTS else 1
    if parts > 1 and (norm or gate or expand or rotate):
        raise ValueError("the inputs of a product with a norm or an epilogue are not shared")
    programs = -(-outputs // tiles.outputs) * parts
    partial = x
    if parts > 1:
        size = programs * MAX_ROWS * tiles.outputs
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    if shrink is not None:
        programs += shrink.chunks * shrink.mid.shape[3]
    skinny_kernel[(programs,)](
        out, x, weight, bias if bias is not None else x, norm.weight if norm else x, rows,
        norm.eps if norm else 0.0, x.stride(0), out.stride(0),
        *((x,) * 8 + (0,) * 4 if change is None else _given(change)),
        *((x,) * 4 + (0,) * 3 if rotate is None else _places(rotate)),
        partial, x if arrived is None else arrived,
        INPUTS=inputs, OUTPUTS=outputs, PARTS=parts, BLOCK_M=MAX_ROWS, BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs, NORM=norm is not None, BIAS=bias is not None, GATE=gate,
        ADD=add_to is not None, LORA=lora, **_sizes(change, tiles, x), **_heads(rotate, width),
        PRECISION=precision(x), **overlapped(),
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=REGISTERS if change else None,
    )  # fmt: skip
    return out


def _given(change: Change) -> tuple[Tensor | int, ...]:
    """What the kernel reads of adapters."""
    site, step = change.site, change.step
    if step.chunk_of is None:
        raise ValueError("the step does not say which chunk each row is in")
    return (
        change.mid, change.arena, step.order, step.chunks, step.chunk_of, site.rows, site.ranks,
        site.spans, change.chunks, *change.strides,
    )  # fmt: skip


def _places(rotate: Rotation) -> tuple[Tensor | int, ...]:
    kv, step = rotate.kv, rotate.step
    strides = kv.stride(0), kv.stride(2), kv.stride(1)
    return step.positions, step.slots, rotate.angles, kv, *strides


def _heads(rotate: Rotation | None, width: int) -> dict[str, int]:
    if rotate is None:
        return dict.fromkeys(("HALF", "Q_HEADS", "KV_HEADS", "PAGE"), 0)
    _, cached, page, dim = rotate.kv.shape
    return {"HALF": dim // 2, "Q_HEADS": width // dim, "KV_HEADS": cached // 2, "PAGE": page}


def _sizes(change: Change | None, tiles: SkinnyTiles, x: Tensor) -> dict[str, int]:
    if change is None:
        return dict.fromkeys(("SPLITS", "SLICES", "RANKS", "GROUP", "BLOCK_R", "SHRINK_K"), 1)
    _, slices, ranks, splits = change.mid.shape
    return {
        "SPLITS": splits, "SLICES": slices, "RANKS": ranks,
        "GROUP": grouped_chunks(tiles.outputs), "BLOCK_R": rank_tile(ranks),
        "SHRINK_K": inputs_tile(x),
    }  # fmt: skip


def skinny_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: RmsNorm | None = None,
    gate: str = "",
    add_to: Tensor | None = None,
    *,
    change: Change | None = None,
) -> Tensor:
    """The same result, computed in float32 and rounded at the end, but for the inputs of adapters."""
    wide = x.float()
    if norm is not None:
        wide = rms_norm_reference(wide, norm)
    y = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if change is not None:
        lora_reference(y, wide.to(x.dtype), change.arena, change.site, change.step)
    if gate:
        y = gated_reference(y, gelu=gate == "gelu")
    return (y if add_to is None else y + add_to.float()).to(x.dtype)
