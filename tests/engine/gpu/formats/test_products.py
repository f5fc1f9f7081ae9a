"""Products of quantised matrices by the kernel and by torch, against values that are written out."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.layers.device.linear import DeviceLinear, product_reference
from engine.backends.layers.device.matrix import DeviceMatrix, from_codes
from engine.backends.layers.packed import Codes
from tests.engine.gpu.device import DEVICE, close

launch = pytest.importorskip("engine.backends.gpu.formats.launch")

WAYS = ["kernel", "reference"]


def product(way: str, x: torch.Tensor, *matrices: DeviceMatrix) -> torch.Tensor:
    linear = DeviceLinear([each.to(x.device) for each in matrices])
    return launch.quantized_linear(x, linear) if way == "kernel" else linear(x)


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, width, generator=generator).to(DEVICE, dtype)


def random_codes(
    out: int, width: int, bits: int, group: int, **how: Any
) -> tuple[Codes, np.ndarray]:
    """A matrix, and its values [out, width] in float64 by the formula."""
    random = np.random.default_rng(out + width)
    codes = random.integers(0, 1 << bits, (out, width))
    groups = -(-width // group)
    scales = random.uniform(0.5, 1.5, (out, groups)).astype(np.float16) / np.float16(256)
    scales[:, ::3] *= -1
    minima = random.normal(0, 0.02, (out, groups)).astype(np.float16) if how.get("minima") else None
    zero = how.get("zero", 1 << (bits - 1))
    index = np.arange(width) // group
    if how.get("sorted_groups"):
        index = random.permutation(index)
    values = (codes - zero) * scales.astype(np.float64)[:, index]
    if minima is not None:
        values += minima.astype(np.float64)[:, index]
    order = np.argsort(index, kind="stable")
    held = Codes(
        codes=torch.from_numpy(codes[:, order].astype(np.uint8)),
        scales=torch.from_numpy(scales.astype(np.float32)),
        minima=None if minima is None else torch.from_numpy(minima.astype(np.float32)),
        bits=bits,
        group=-(-width // 32) * 32 if groups == 1 else group,
        zero=zero,
        order=torch.from_numpy(order) if how.get("sorted_groups") else None,
    )
    return held, values


def check(way: str, x: torch.Tensor, matrix: DeviceMatrix, values: np.ndarray) -> None:
    want = x.double().cpu() @ torch.from_numpy(values).t()
    if matrix.bias is not None:
        want += matrix.bias.double().cpu()
    close(product(way, x, matrix), want.to(x.dtype).to(DEVICE))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("count", "bits", "dtype"),
    [
        (1, 4, torch.float32), (16, 8, torch.bfloat16), (40, 4, torch.bfloat16),
        (1, 4, torch.float16), (40, 8, torch.float32),
    ],
)  # fmt: skip
def test_groups_of_128(way: str, dtype: torch.dtype, bits: int, count: int) -> None:
    codes, values = random_codes(96, 256, bits, 128, minima=bits == 4)
    check(way, rows(count, 256, dtype), from_codes(codes), values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ((17, 96, 4, 32), {}),
        ((33, 80, 4, 16), {"minima": True, "zero": 0}),  # half a span is beyond the last group
        ((50, 80, 8, 16), {}),
        (
            (7, 104, 4, 104),
            {"minima": True},
        ),  # one scale an output, and inputs beside the last span
        ((21, 40, 8, 40), {"minima": True}),
        ((20, 48, 4, 48), {"minima": True}),  # the last half of a span is beyond the inputs
        ((64, 192, 4, 96), {}),
        ((19, 192, 4, 64), {"sorted_groups": True}),
        ((19, 64, 8, 16), {"sorted_groups": True, "minima": True}),
        ((3, 5, 4, 5), {}),
    ],
)
@pytest.mark.parametrize("count", [3, 35])
def test_odd_shapes(
    way: str, sizes: tuple[int, int, int, int], how: dict[str, Any], count: int
) -> None:
    """`sizes`: outputs, inputs, bits, inputs of a group."""
    out, width = sizes[:2]
    codes, values = random_codes(*sizes, **how)
    matrix = from_codes(codes, torch.linspace(-1, 1, out) if out % 2 else None)
    check(way, rows(count, width), matrix, values)


@pytest.mark.parametrize("way", WAYS)
def test_hundreds_of_rows_and_a_view_of_them(way: str) -> None:
    codes, values = random_codes(70, 128, 4, 32)
    x = rows(300, 200)[:, 30:158]
    check(way, x, from_codes(codes), values)


@pytest.mark.parametrize("way", WAYS)
def test_matrices_of_several_formats_lie_side_by_side(way: str) -> None:
    first, ones = random_codes(20, 64, 4, 32)
    second, others = random_codes(12, 64, 8, 64)
    x = rows(5, 64)
    want = x.double().cpu() @ torch.from_numpy(np.concatenate((ones, others))).t()
    close(product(way, x, from_codes(first), from_codes(second)), want.float().to(DEVICE))


@pytest.mark.parametrize("way", WAYS)
def test_scales_beyond_float16(way: str) -> None:
    """A factor of each output keeps them in range."""
    codes, values = random_codes(16, 64, 4, 32)
    held = Codes(codes.codes, codes.scales * 2.0**-30, None, 4, 32, 8)
    check(way, rows(2, 64), from_codes(held), values * 2.0**-30)


def test_the_packed_matrix_takes_the_bits_that_it_says() -> None:
    codes, _ = random_codes(64, 512, 4, 128)
    assert from_codes(codes).bytes == 64 * 512 // 2 + 2 * 64 * 4 + 4 * 64
    x = rows(2, 512)
    assert torch.equal(
        product_reference(x, from_codes(codes)), DeviceLinear([from_codes(codes)])(x)
    )
