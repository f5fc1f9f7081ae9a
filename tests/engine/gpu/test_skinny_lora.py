"""Adapters in the products of few rows, and in the launch between them, against plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_chunks import chunk_of_rows
from engine.backends.gpu.adapters.lora_reference import LoraSite, LoraStep, lora_reference
from engine.backends.layers.norm import RmsNorm
from tests.engine.gpu.device import DEVICE, close
from tests.engine.gpu.test_lora import make_site, make_step
from tests.engine.gpu.test_skinny import TILES, random

skinny = pytest.importorskip("engine.backends.gpu.skinny_launch")
lora = pytest.importorskip("engine.backends.gpu.adapters.skinny_lora_launch")

RANKS = [[1, 16, 7], [40, 0, 33], [0, 0, 0], [16, 8, 20]]
WIDTHS = [40, 24, 24]
SLOTS = [3, -1, 0, 1, 0, 2, 3, -1, 1]


def of_rows(slots: list[int], max_rank: int, padding: int = 0) -> LoraStep:
    step = make_step(slots, 16, max_rank, padding)
    owners = chunk_of_rows(step.order.cpu().numpy(), step.chunks.cpu().numpy(), len(slots))
    return replace(step, chunk_of=torch.from_numpy(owners).to(DEVICE))


def change(
    slots: list[int],
    ranks: list[list[int]],
    widths: list[int],
    inputs: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Any:
    site, arena = make_site(ranks, widths, inputs, dtype)
    made = lora.change_of(arena, site, of_rows(slots, site.rows.shape[3], padding))
    made.mid.fill_(float("nan"))  # to read what no program has written shows
    return made


def added(x: Tensor, made: Any, outputs: int) -> Tensor:
    """What the reference adds to a product of `x`, in float32."""
    y = torch.zeros(x.shape[0], outputs, device=DEVICE)
    lora_reference(y, x, made.arena, made.site, made.step)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [72, 1100])  # 1,100: in two splits
@pytest.mark.parametrize("normed", [False, True])
def test_expanded_by_the_product(dtype: torch.dtype, inputs: int, normed: bool) -> None:
    made = change(SLOTS, RANKS, WIDTHS, inputs, dtype, padding=2)
    x, weight = random(9, inputs, dtype=dtype), random(88, inputs, dtype=dtype, seed=1)
    weight *= inputs**-0.5
    norm = RmsNorm(random(inputs, dtype=dtype, seed=2), 1e-5) if normed else None
    before = x.clone()
    lora.link(x, None, made, norm)
    got = skinny.skinny_linear(x, weight, TILES, norm=norm, expand=made)
    assert torch.equal(x, before)
    close(got, skinny.skinny_reference(x, weight, norm=norm, change=made))
    plain = skinny.skinny_reference(x, weight, norm=norm)
    assert (got - plain).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expanded_before_the_gate(dtype: torch.dtype) -> None:
    made = change(SLOTS, [each[:2] for each in RANKS], [40, 40], 64, dtype)
    x, weight = random(9, 64, dtype=dtype), random(80, 64, dtype=dtype, seed=1) * 0.2
    norm, bias = RmsNorm(random(64, seed=2), 1e-6), random(80, dtype=dtype, seed=3)
    lora.link(x, None, made, norm)
    got = skinny.skinny_linear(x, weight, TILES, bias=bias, norm=norm, gate="silu", expand=made)
    close(got, skinny.skinny_reference(x, weight, bias, norm, "silu", change=made))


@pytest.mark.parametrize(("dtype", "padding"), [(torch.float32, 3), (torch.bfloat16, 0)])
def test_shrunk_beside_a_product_and_added_before_the_next(
    dtype: torch.dtype, padding: int
) -> None:
    """As of o, and then of gate and up."""
    both = change(SLOTS, RANKS, [1100, 32, 32], 1100, dtype, padding)
    table, spans = both.site, torch.tensor([[0, 32], [32, 32]], dtype=torch.int32, device=DEVICE)
    sites = (
        LoraSite(table.rows[:, :1], table.ranks[:, :1], table.spans[:1], 1100, 1100),
        LoraSite(table.rows[:, 1:], table.ranks[:, 1:], spans, 1100, 32),
    )
    first, second = (lora.change_of(both.arena, site, both.step) for site in sites)
    y, weight = random(9, 1100, dtype=dtype), random(1100, 1100, dtype=dtype, seed=1) * 0.02
    total, norm = random(9, 1100, dtype=dtype, seed=2), RmsNorm(random(1100, seed=3), 1e-5)
    want = (skinny.skinny_reference(y, weight, add_to=total) + added(y, first, 1100)).to(dtype)
    skinny.skinny_linear(y, weight, TILES, add_to=total, shrink=first)
    lora.link(total, first, second, norm)
    close(total, want)
    after = random(64, 1100, dtype=dtype, seed=4) * 0.03
    got = skinny.skinny_linear(total, after, TILES, norm=norm, expand=second)
    close(got, skinny.skinny_reference(total, after, norm=norm, change=second))


def test_the_last_change_is_added_without_a_product_behind_it() -> None:
    made = change(SLOTS, [[2], [40], [0], [17]], [96], 80)
    y, x = random(9, 80), random(9, 96, seed=1)
    want = x + added(y, made, 96)
    lora.link(y, None, made, None)
    lora.link(x, made, None, None)
    close(x, want)
    assert torch.equal(x[[1, 5, 7]], random(9, 96, seed=1)[[1, 5, 7]])


def outputs(slots: list[int], arena: Tensor | None = None) -> Tensor:
    """Of 16 rows, each with the adapter of its slot."""
    made = change(slots, [[16]] * 16, [64], 80)
    made = made if arena is None else replace(made, arena=arena)
    x, weight = random(16, 80), random(64, 80, seed=1) * 0.1
    lora.link(x, None, made, RmsNorm(random(80, seed=2), 1e-5))
    return skinny.skinny_linear(
        x, weight, skinny.SkinnyTiles(64, 32, 4, 2), norm=RmsNorm(random(80, seed=2), 1e-5),
        expand=made,
    )  # fmt: skip


def test_every_row_has_an_adapter_of_its_own_and_only_that_one() -> None:
    """Four groups of chunks; a row's bits stay where others exchange their adapters."""
    there, other = outputs(list(range(16))), outputs([0, 1, *range(15, 1, -1)])
    assert torch.equal(there[:2], other[:2])
    assert (there[2:] != other[2:]).any(1).sum() >= 14
    site, arena = make_site([[16]] * 16, [64], 80, torch.float32)
    broken = arena.clone()
    for place in site.rows[5, 0, 1, :16].tolist():
        broken[place * 64 : place * 64 + 64] = float("inf")
    rows = [n for n in range(16) if n != 5]
    assert torch.equal(outputs(list(range(16)), broken)[rows], there[rows])


def test_a_step_that_does_not_say_whose_rows_are_whose_is_refused() -> None:
    made = change(SLOTS, [[2], [40], [0], [17]], [96], 80)
    made = replace(made, step=replace(made.step, chunk_of=None))
    with pytest.raises(ValueError, match="which chunk each row is in"):
        skinny.skinny_linear(random(9, 80), random(96, 80), TILES, expand=made)


def test_sites_of_two_tables_are_refused() -> None:
    first = change(SLOTS, [[2], [40], [0], [17]], [96], 96)
    second = change(SLOTS, RANKS, WIDTHS, 96)
    with pytest.raises(ValueError, match="one table"):
        lora.link(random(9, 96), first, second, None)
