"""RMS norm, rotary with KV write and the gated activation: each kernel against plain torch."""

import pytest
import torch

from engine.kernels import pointwise_reference as reference
from engine.kernels.pointwise_reference import RotaryStep
from engine.layers.norm import RmsNorm

from .device import DEVICE, close

kernels = pytest.importorskip("engine.kernels.pointwise_launch")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "offset"), [(64, False), (100, True), (1536, False)])
def test_rms_norm(width: int, offset: bool, dtype: torch.dtype) -> None:
    x, norm = (
        random(5, width, dtype=dtype),
        RmsNorm(random(width, dtype=dtype, seed=1), 1e-5, offset),
    )
    want = reference.rms_norm_reference(x, norm)
    close(kernels.rms_norm(x, norm), want)
    close(kernels.rms_norm(x[::2], norm), want[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_residual(dtype: torch.dtype) -> None:
    x, norm = random(3, 96, dtype=dtype), RmsNorm(random(96, dtype=dtype, seed=1), 1e-6)
    ours, theirs = (random(3, 96, dtype=dtype, seed=2) for _ in range(2))
    close(kernels.rms_norm(x, norm, ours), reference.rms_norm_reference(x, norm, theirs))
    close(ours, theirs)  # the interpreter truncates where hardware rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed", "rotated"),
    [
        (4, 2, 64, False, True),
        (5, 1, 80, False, True),
        (4, 4, 96, True, True),
        (2, 1, 256, True, True),
        (5, 1, 80, False, False),
    ],
)
def test_rotary_writes_the_cache(
    heads: int, kv_heads: int, dim: int, normed: bool, rotated: bool, dtype: torch.dtype
) -> None:
    qkv = random(4, (heads + 2 * kv_heads) * dim, dtype=dtype)
    slots = torch.tensor([37, 0, -1, 63], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([5, 0, 9, 31], dtype=torch.int32, device=DEVICE)
    step = RotaryStep(positions, slots)
    angles = torch.outer(torch.arange(32.0), 10000.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    table = torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE) if rotated else None
    gains = (random(dim, dtype=dtype, seed=seed) for seed in (2, 3))
    norms = tuple(RmsNorm(gain, 1e-6) for gain in gains) if normed else None
    caches = [torch.full((4, 2 * kv_heads, 16, dim), 9.0, dtype=dtype, device=DEVICE) for _ in "ab"]
    queries = [
        f(qkv, cache, step, table, norms)
        for f, cache in zip((kernels.rotary, reference.rotary_reference), caches, strict=True)
    ]
    close(*queries)
    close(*caches)
    assert (caches[0][2] == 9).sum() == 2 * kv_heads * dim * 15  # one token of block 2 was written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [48, 1500])
def test_gated(width: int, gelu: bool, dtype: torch.dtype) -> None:
    x = random(3, 2 * width, dtype=dtype) * 3
    close(kernels.gated(x, gelu), reference.gated_reference(x, gelu))
