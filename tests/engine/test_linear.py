"""Packed and plain products agree, with whatever is fused behind them."""

import pytest
import torch
import torch.nn.functional as F

from engine.layers.linear import GatedLinear, Linear, can_pack

SHAPES = [(96, 64, torch.float32), (1100, 1024, torch.float32), (96, 64, torch.bfloat16)]


@pytest.mark.parametrize(("out", "width", "dtype"), SHAPES)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("biased", [False, True])
def test_products_and_what_follows_them(
    out: int, width: int, dtype: torch.dtype, rows: int, biased: bool
) -> None:
    random = torch.Generator().manual_seed(out + rows)

    def made(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=random) / 8).to(dtype)

    weight, x, other = made(out, width), made(rows, width), made(rows, out)
    bias = made(out) if biased else None
    kept = other.clone()
    linear = Linear(weight, bias)
    plain = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for found, expected in (
        (linear(x), plain),
        (linear.plus(x, other), plain + other.double()),
        (linear.times(x, other), plain * other.double()),
        (linear.activated(x, "silu"), F.silu(plain)),
        (linear.activated(x, "gelu_tanh"), F.gelu(plain, approximate="tanh")),
    ):
        torch.testing.assert_close(found.double(), expected, **close)
    assert torch.equal(other, kept)


@pytest.mark.parametrize(("out", "width", "dtype"), SHAPES)
def test_gated_products(out: int, width: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(out)
    weight = (torch.randn(2 * out, width, generator=random) / 8).to(dtype)
    x = (torch.randn(3, width, generator=random) / 4).to(dtype)
    gated = GatedLinear(weight)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, -1)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(gated.gated(x, "silu").double(), F.silu(gate) * up, **close)
    torch.testing.assert_close(gated(x).double(), torch.cat((gate, up), -1), **close)
    for found, expected in zip(gated.halves(x), (gate, up), strict=True):
        torch.testing.assert_close(found.double(), expected, **close)


def test_only_what_gains_is_packed() -> None:
    assert not can_pack(torch.zeros(64, 64))
    assert not can_pack(torch.zeros(64, 64, dtype=torch.float16))
    assert not can_pack(torch.zeros(64, 64, device="meta"))
