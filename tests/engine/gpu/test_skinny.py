"""The linear of few rows, with what it takes along, against plain torch."""

import pytest
import torch

from engine.backends.gpu.pointwise_reference import RotaryStep, rotary_reference
from engine.backends.layers.norm import RmsNorm
from tests.engine.gpu.device import DEVICE, close

skinny = pytest.importorskip("engine.backends.gpu.skinny_launch")

TILES = skinny.SkinnyTiles(16, 32, 4, 2)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 48), (16, 70, 33), (3, 96, 16)])
@pytest.mark.parametrize("normed", [False, True])
def test_plain_and_normed(
    rows: int, inputs: int, outputs: int, normed: bool, dtype: torch.dtype
) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    norm = RmsNorm(random(inputs, dtype=dtype, seed=2), 1e-5) if normed else None
    bias = random(outputs, dtype=dtype, seed=3) if rows == 3 else None
    got = skinny.skinny_linear(x, weight, TILES, bias=bias, norm=norm)
    close(got, skinny.skinny_reference(x, weight, bias, norm))


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_gated(gate: str, biased: bool, dtype: torch.dtype) -> None:
    x, weight = random(5, 64, dtype=dtype), random(2 * 40, 64, dtype=dtype, seed=1) * 0.2
    norm = RmsNorm(random(64, seed=2), 1e-6)
    bias = random(2 * 40, dtype=dtype, seed=3) if biased else None
    got = skinny.skinny_linear(x, weight, TILES, bias=bias, norm=norm, gate=gate)
    close(got, skinny.skinny_reference(x, weight, bias, norm, gate))


def test_summed_into_the_residual_in_place() -> None:
    x, weight, residual = random(2, 64), random(48, 64, seed=1), random(2, 48, seed=2)
    want = skinny.skinny_reference(x, weight, add_to=residual)
    got = skinny.skinny_linear(x, weight, TILES, add_to=residual)
    assert got is residual
    close(got, want)


def test_more_rows_than_it_is_for_are_refused() -> None:
    with pytest.raises(ValueError, match="17 rows"):
        skinny.skinny_linear(random(17, 64), random(48, 64), TILES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 1, 24)])
def test_rotated_and_stored(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Queries and the cache are those of the product and then the kernel of the rotation; a row of
    padding has no place in the cache."""
    x, outputs = random(5, 64, dtype=dtype), (heads + 2 * kv_heads) * dim
    weight, norm = random(outputs, 64, dtype=dtype, seed=1) * 0.2, RmsNorm(random(64, seed=2), 1e-5)
    bias = random(outputs, dtype=dtype, seed=3)
    angles = random(40, dim, seed=4)
    slots = torch.tensor([3, 40, -1, 17, 63], dtype=torch.int32, device=DEVICE)
    step = RotaryStep(torch.tensor([0, 39, 5, 7, 20], dtype=torch.int32, device=DEVICE), slots)
    ours, theirs = (torch.full((5, 2 * kv_heads, 16, dim), 7.0).to(DEVICE, dtype) for _ in "ab")
    got = skinny.skinny_linear(
        x, weight, TILES, bias=bias, norm=norm, rotate=skinny.Rotation(step, angles, ours)
    )
    qkv = skinny.skinny_reference(x, weight, bias, norm)
    want = rotary_reference(qkv, theirs, step, angles)
    close(got.view(want.shape), want)
    close(ours, theirs)
    assert (ours != 7).any((1, 3)).sum() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [4096, 4100])
def test_inputs_shared_by_programs(inputs: int, dtype: torch.dtype) -> None:
    """Twice the same bits, and the counters are as before; the last part may be short."""
    tiles = skinny.SkinnyTiles(16, 256, 4, 2, parts=3)
    x, weight = random(3, inputs, dtype=dtype), random(40, inputs, dtype=dtype, seed=1)
    bias, arrived = random(40, dtype=dtype, seed=3), torch.zeros(3, dtype=torch.int32).to(DEVICE)
    found = []
    for _ in range(2):
        residual = random(3, 40, dtype=dtype, seed=2)
        want = skinny.skinny_reference(x, weight, bias, add_to=residual)
        skinny.skinny_linear(x, weight, tiles, bias=bias, add_to=residual, arrived=arrived)
        close(residual, want)
        found.append(residual)
        assert not arrived.any()
    assert torch.equal(*found)


def test_what_comes_after_a_product_needs_all_of_its_inputs() -> None:
    tiles = skinny.SkinnyTiles(16, 256, 4, 2, parts=2)
    with pytest.raises(ValueError, match="are not shared"):
        skinny.skinny_linear(
            random(1, 4096), random(32, 4096), tiles, gate="silu",
            arrived=torch.zeros(2, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
