"""Mixtures of experts by the kernels and by torch, against sums that are written out."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.layers.device.linear import DeviceLinear
from engine.backends.layers.device.matrix import DeviceMatrix, from_codes, from_floats, stacked
from engine.backends.layers.device.mixture import DeviceMixture, mixture_reference
from engine.backends.layers.packed import Codes
from engine.backends.layers.routing import Router
from engine.model_spec import ExpertsSpec
from tests.engine.gpu.device import DEVICE, close

launch = pytest.importorskip("engine.backends.gpu.formats.experts_launch")
products = pytest.importorskip("engine.backends.gpu.formats.launch")

HIDDEN, SIZE, COUNT, ACTIVE = 40, 24, 6, 2
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of e2m1, by its three lower bits


def mxfp4(random: Any, out: int, width: int) -> tuple[Codes, np.ndarray]:
    codes = random.integers(0, 16, (out, width))
    powers = 2.0 ** random.integers(-5, -1, (out, -(-width // 32)))
    sizes = np.array(VALUES)[codes & 7]
    values = np.where(codes & 8, -sizes, sizes) * powers[:, np.arange(width) // 32]
    held = Codes(
        torch.from_numpy(codes.astype(np.uint8)), torch.from_numpy(powers.astype(np.float32)), None,
        4, 32, 0, kind="e2m1",
    )  # fmt: skip
    return held, values


def matrices(kind: str, out: int, width: int, dtype: torch.dtype) -> tuple[DeviceMatrix, Any]:
    """Of all experts, and their values [experts, out, width]."""
    random = np.random.default_rng(out)
    held, values = [], []
    for number in range(COUNT):
        bias = torch.linspace(-0.2, 0.2, out) * number
        if kind == "float":
            weight = torch.from_numpy(random.normal(0, width**-0.5, (out, width))).to(dtype)
            held.append(from_floats(weight, bias))
            values.append(weight.double().numpy())
            continue
        if kind == "mxfp4":
            codes, found = mxfp4(random, out, width)
        else:
            raw = random.integers(0, 16, (out, width))
            scales = (random.uniform(0.5, 1.5, (out, -(-width // 16))) / 64).astype(np.float16)
            found = (raw - 8) * scales.astype(np.float64)[:, np.arange(width) // 16]
            codes = Codes(
                torch.from_numpy(raw.astype(np.uint8)), torch.from_numpy(scales.astype(np.float32)),
                None, 4, 16, 8,
            )  # fmt: skip
        held.append(from_codes(codes, bias))
        values.append(found)
    return stacked(held).to(torch.device(DEVICE)), np.stack(values)


def mixture(kind: str, dtype: torch.dtype, **how: Any) -> tuple[DeviceMixture, list[Any]]:
    up, ups = matrices(kind, 2 * SIZE, HIDDEN, dtype)
    down, downs = matrices(kind, HIDDEN, SIZE, dtype)
    weight = torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    spec = ExpertsSpec(count=COUNT, active=ACTIVE, intermediate=SIZE, layers=frozenset({0}))
    router = Router(spec, weight)
    return DeviceMixture(0, router, up, down, None, ACTIVE, **how), [weight, ups, downs]


def written_out(x: torch.Tensor, parts: list[Any], clamp: tuple[float, float] | None) -> Any:
    """In float64: the shares are those of the two best scores, which add up to 1."""
    weight, ups, downs = parts
    rows = x.double().cpu().numpy()
    scores = rows @ weight.double().cpu().numpy().T
    out = np.zeros((len(rows), HIDDEN))
    loads = [0] * COUNT
    for row, values, score in zip(out, rows, scores, strict=True):
        best = np.argsort(-score)[:ACTIVE]
        shares = np.exp(score[best] - score[best].max())
        for number, share in zip(best, shares / shares.sum(), strict=True):
            both = ups[number] @ values + np.linspace(-0.2, 0.2, 2 * SIZE) * number
            gate, up = both[:SIZE], both[SIZE:]
            if clamp is None:
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, clamp[1]), np.clip(up, -clamp[1], clamp[1])
                inner = gate / (1 + np.exp(-gate * clamp[0])) * (up + 1)
            row += share * (downs[number] @ inner + np.linspace(-0.2, 0.2, HIDDEN) * number)
            loads[number] += 1
    return torch.from_numpy(out), loads


@pytest.mark.parametrize("way", ["kernels", "reference"])
@pytest.mark.parametrize(
    ("kind", "count", "dtype", "clamp"),
    [
        ("float", 1, torch.float32, None),
        (
            "float",
            70,
            torch.float32,
            None,
        ),  # more than the 96 choices that chunks of few rows are for
        ("int4", 5, torch.float32, None),
        ("mxfp4", 5, torch.float32, (1.702, 0.5)),
        ("mxfp4", 3, torch.bfloat16, (1.702, 0.5)),
    ],
)
def test_the_weighted_sum(
    way: str, kind: str, count: int, dtype: torch.dtype, clamp: tuple[float, float] | None
) -> None:
    made, parts = mixture(kind, dtype, clamp=clamp)
    made.load = torch.zeros(COUNT, dtype=torch.int64, device=DEVICE)
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)
    want, loads = written_out(x, parts, clamp)
    if way == "reference":
        got = mixture_reference(made, x, "silu")
    else:
        real = torch.ones(count, dtype=torch.bool, device=DEVICE)
        got = launch.experts(made, x, real, "silu")
        assert made.load.tolist() == loads
    close(got, want.to(dtype).to(DEVICE))


def test_padding_uses_no_expert_and_changes_no_other_row() -> None:
    made, parts = mixture("float", torch.float32)
    made.load = torch.zeros(COUNT, dtype=torch.int64, device=DEVICE)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    x[1] = float("nan")
    real = torch.tensor([True, False, True, True, False, False], device=DEVICE)
    got = launch.experts(made, x, real, "silu")
    want, loads = written_out(x[real], parts, None)
    close(got[real], want.float().to(DEVICE))
    assert not got[~real].any() and made.load.tolist() == loads


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_every_choice_lies_in_one_chunk_of_its_expert(tokens: int) -> None:
    """Counted by hand; 5 stands for no expert."""
    random = np.random.default_rng(tokens)
    chosen = torch.from_numpy(random.integers(0, 6, (tokens, 3))).to(DEVICE)
    found = launch.sort_choices(chosen, 5)
    table, places = found.by_expert.chunks.tolist(), found.by_expert.places.tolist()
    seen = []
    for expert, first, count in table:
        assert 0 <= count <= found.by_expert.rows
        mine = places[first : first + count]
        assert all(chosen.flatten()[each] == expert for each in mine)
        seen += mine
    flat = chosen.flatten().tolist()
    assert sorted(seen) == [n for n, expert in enumerate(flat) if expert < 5]
    assert found.counts.tolist() == [flat.count(expert) for expert in range(5)]
    assert [places[place] for place in found.place.flatten().tolist()] == list(range(len(flat)))


def test_mxfp4_by_itself() -> None:
    codes, values = mxfp4(np.random.default_rng(3), 18, 96)
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    linear = DeviceLinear([from_codes(codes).to(torch.device(DEVICE))])
    want = (x.double().cpu() @ torch.from_numpy(values).t()).float().to(DEVICE)
    for got in (products.quantized_linear(x, linear), linear(x)):
        close(got, want)
    assert linear.parts[0].bytes == 18 * (48 + 3), "4.25 bits a weight"


def test_experts_that_are_not_stored_alike_are_refused() -> None:
    first = from_floats(torch.zeros(4, 32))
    with pytest.raises(ValueError, match="codes differ in shape"):
        stacked([first, from_floats(torch.zeros(4, 64))])
