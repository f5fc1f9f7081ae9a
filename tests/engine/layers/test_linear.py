"""Packed and plain products agree, with whatever is fused behind them."""

import pytest
import torch
import torch.nn.functional as F

from engine.backends.compiled.half import fits_half
from engine.backends.layers.linear import DenseGatedLinear, DenseLinear, can_pack

SHAPES = [
    (96, 64, torch.float32),
    (1100, 1024, torch.float32),
    (96, 64, torch.bfloat16),
    (1024, 512, torch.float16),  # the type that weights were stored in, computed in float32
]


def computed(values: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    return values.to(stored).to(torch.float32 if stored is torch.float16 else stored)


def tolerance(stored: torch.dtype) -> dict[str, float]:
    exact = stored is not torch.bfloat16
    return {"atol": 1e-5, "rtol": 1e-5} if exact else {"atol": 0.05, "rtol": 0.02}


@pytest.mark.parametrize(("out", "width", "dtype"), SHAPES)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("biased", [False, True])
def test_products_and_what_follows_them(
    out: int, width: int, dtype: torch.dtype, rows: int, biased: bool
) -> None:
    random = torch.Generator().manual_seed(out + rows)

    def made(*size: int) -> torch.Tensor:
        return computed(torch.randn(*size, generator=random) / 8, dtype)

    weight, x, other = made(out, width), made(rows, width), made(rows, out)
    bias = made(out) if biased else None
    kept = other.clone()
    linear = DenseLinear(weight, bias)
    plain = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close = tolerance(dtype)
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
    weight = computed(torch.randn(2 * out, width, generator=random) / 8, dtype)
    x = computed(torch.randn(3, width, generator=random) / 4, dtype)
    gated = DenseGatedLinear(weight)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, -1)
    close = tolerance(dtype)
    torch.testing.assert_close(gated.gated(x, "silu").double(), F.silu(gate) * up, **close)
    torch.testing.assert_close(gated(x).double(), torch.cat((gate, up), -1), **close)
    for found, expected in zip(gated.halves(x), (gate, up), strict=True):
        torch.testing.assert_close(found.double(), expected, **close)


def test_only_what_gains_is_packed() -> None:
    assert not can_pack(torch.zeros(64, 64))
    assert not can_pack(torch.zeros(64, 64, dtype=torch.float16))
    assert not can_pack(torch.zeros(64, 64, device="meta"))


@pytest.mark.parametrize("kind", [DenseLinear, DenseGatedLinear])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.bfloat16])
def test_a_packed_weight_keeps_nothing_of_the_plain_one(
    kind: type[DenseLinear], stored: torch.dtype
) -> None:
    weight = computed(torch.randn(2048, 1024, generator=torch.Generator().manual_seed(2)), stored)
    linear = kind(weight)
    kept = [linear, *(getattr(linear, "_halves", None) or ())]
    plain = [each.weight for each in kept if each.weight.layout == torch.strided]
    used = sum(each.numel() * each.itemsize for each in plain)
    assert sum(each.untyped_storage().nbytes() for each in plain) == used


def test_float16_keeps_only_weights_that_lose_nothing_by_it() -> None:
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        pytest.skip("this build of torch has no product of float32 rows and float16 weights")
    trained = torch.randn(1024, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    assert fits_half(trained.bfloat16().float())
    assert fits_half(trained.half().float())
    assert not fits_half(trained)
    assert not fits_half(trained.bfloat16())
    assert not fits_half(trained.half().float()[:512])
    assert not fits_half(torch.full((1024, 512), 2.0**17))
    assert not fits_half(torch.full((1024, 512), 2.0**-30))
