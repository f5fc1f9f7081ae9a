"""Segmented LoRA: each way of launching it against plain torch, and plain torch against the two
products of one adapter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.gpu.adapters.lora_chunks import max_chunks, sort_into_chunks
from engine.backends.gpu.adapters.lora_reference import UNIT, LoraSite, LoraStep, lora_reference
from tests.engine.gpu.device import DEVICE, close

kernels = pytest.importorskip("engine.backends.gpu.adapters.lora_launch")

Ranks = list[list[int]]  # of every slot and slice


def make_site(ranks: Ranks, widths: list[int], inputs: int, dtype: torch.dtype, seed: int = 0):
    """Rank rows scattered over an arena whose other elements are not numbers: to read one shows."""
    generator = torch.Generator().manual_seed(seed)
    most = max(16, *(r for slot in ranks for r in slot))
    lengths = [-(-max(inputs, *widths) // UNIT)] * (2 * sum(map(sum, ranks)))
    places = (torch.tensor([0, *lengths]).cumsum(0)[:-1] + 1)[
        torch.randperm(len(lengths), generator=generator)
    ]
    arena = torch.full(((sum(lengths) + 2) * UNIT,), float("nan"))
    rows = torch.full((len(ranks), len(widths), 2, most), 2**30, dtype=torch.int32)
    used = 0
    for slot, of_slices in enumerate(ranks):
        for piece, rank in enumerate(of_slices):
            for side, width in ((0, inputs), (1, widths[piece])):
                for i in range(rank):
                    place = int(places[used])
                    used += 1
                    rows[slot, piece, side, i] = place
                    value = torch.randn(width, generator=generator) / width**0.5
                    arena[place * UNIT : place * UNIT + width] = value
    starts = torch.tensor([0, *widths]).cumsum(0)[:-1]
    site = LoraSite(
        rows.to(DEVICE),
        torch.tensor(ranks, dtype=torch.int32, device=DEVICE),
        torch.stack((starts, torch.tensor(widths)), 1).int().to(DEVICE),
        inputs,
        max(widths),
    )
    return site, arena.to(DEVICE, dtype)


def make_step(slots: list[int], chunk_rows: int, max_rank: int, padding: int = 0) -> LoraStep:
    order, chunks = map(torch.from_numpy, sort_into_chunks(np.array(slots), chunk_rows))
    chunks = torch.cat((chunks, torch.zeros(padding, 3, dtype=torch.int32)))
    return LoraStep(order.to(DEVICE), chunks.to(DEVICE), chunk_rows, max_rank)


def run(
    slots: list[int],
    ranks: Ranks,
    widths: list[int],
    inputs: int,
    dtype: torch.dtype = torch.float32,
    chunk_rows: int = 16,
    *,
    way: str = "add_lora",
    padding: int = 0,
) -> tuple[Tensor, Tensor]:
    site, arena = make_site(ranks, widths, inputs, dtype)
    step = make_step(slots, chunk_rows, site.rows.shape[3], padding)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(slots), inputs, generator=generator).to(DEVICE, dtype)
    y = torch.randn(len(slots), sum(widths), generator=generator).to(DEVICE, dtype)
    want = y.clone()
    lora_reference(want, x, arena, site, step)
    if way == "apart":
        mid = kernels.shrink_buffer(x, site, step).fill_(float("nan"))
        kernels.shrink(x, arena, site, step, mid)
        kernels.expand(y, mid, arena, site, step)
    else:
        getattr(kernels, way)(y, x, arena, site, step)
    return y, want


@pytest.mark.parametrize("way", ["apart", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_adapter(way: str, dtype: torch.dtype) -> None:
    close(*run([0, 0, 0], [[8]], [80], 96, dtype, way=way))


@pytest.mark.parametrize("way", ["apart", "fused"])
def test_ranks_from_1_to_256_mixed_over_three_slices(way: str) -> None:
    ranks = [[1, 16, 7], [256, 0, 40], [0, 0, 0], [32, 8, 64]]
    close(*run([3, -1, 0, 1, 0, 2, 3, -1, 1], ranks, [200, 48, 48], 72, way=way))


@pytest.mark.parametrize("way", ["apart", "fused"])
def test_an_adapter_with_more_rows_than_a_chunk(way: str) -> None:
    close(*run([1] * 35 + [0] * 3 + [1], [[4], [20]], [64], 64, way=way, padding=3))


def test_inputs_that_are_split() -> None:
    assert kernels.shrink_splits(2, 1100) == 2
    close(*run([0, 1], [[4], [20]], [64], 1100, way="apart"))


def test_wide_chunks_as_for_prompts() -> None:
    close(*run([0] * 70 + [-1] * 5 + [1] * 20, [[16], [3]], [130], 64, chunk_rows=64))


def test_rows_without_an_adapter_stay_as_they_are() -> None:
    got, want = run([-1, 0, -1], [[16]], [64], 64)
    assert torch.equal(got[::2], want[::2])


def test_the_reference_equals_two_products() -> None:
    site, arena = make_site([[5]], [48], 40, torch.float32)
    x = torch.randn(3, 40, device=DEVICE)
    y = torch.zeros(3, 48, device=DEVICE)
    lora_reference(y, x, arena, site, make_step([0, 0, 0], 16, 16))
    a, b = (
        torch.stack([arena[p * UNIT : p * UNIT + n] for p in site.rows[0, 0, side, :5].tolist()])
        for side, n in ((0, 40), (1, 48))
    )
    close(y, x @ a.T @ b)


@settings(max_examples=60)
@given(
    slots=st.lists(st.integers(-1, 5), min_size=1, max_size=150),
    chunk_rows=st.sampled_from([16, 64]),
)
def test_chunks_hold_every_row_once_and_one_adapter_each(slots: list[int], chunk_rows: int) -> None:
    order, chunks = map(torch.from_numpy, sort_into_chunks(np.array(slots), chunk_rows))
    held = []
    for slot, first, count in chunks.tolist():
        assert 0 < count <= chunk_rows
        rows = order[first : first + count].tolist()
        assert {slots[row] for row in rows} == {slot}
        held += rows
    assert held == order.tolist()
    assert sorted(held) == [i for i, slot in enumerate(slots) if slot >= 0]
    adapters = len({slot for slot in slots if slot >= 0})
    assert len(chunks) <= max_chunks(len(slots), adapters, chunk_rows)
