"""The compiled products against torch's and against a plain formula, for every kind of processor."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.backends.layers import packed
from engine.backends.layers.packed import Codes, pack
from engine.backends.layers.quantised_linear import (
    QuantizedEmbedding,
    QuantizedGatedLinear,
    QuantizedLinear,
)

# (bits, inputs of a scale, minima) and (outputs, inputs): odd, and with a rest of a group.
FORMATS = [(8, 32, False), (8, 16, False), (8, 32, True), (8, 96, False),
           (4, 32, False), (4, 32, True), (4, 16, True), (4, 16, False), (4, 64, True)]  # fmt: skip
SHAPES = [(48, 192), (37, 96), (5, 80)]


def random_codes(bits: int, group: int, minima: bool, shape: tuple[int, int]) -> Codes:
    random = torch.Generator().manual_seed(bits * group + shape[0])
    groups = shape[0], -(-shape[1] // group)
    zero = 128 if bits == 8 else 0 if minima else 8
    return Codes(
        codes=torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=random),
        scales=(torch.rand(groups, generator=random) * 0.02).half().float(),
        minima=(torch.randn(groups, generator=random) / 8).half().float() if minima else None,
        bits=bits, group=group, zero=zero,
    )  # fmt: skip


def in_steps(x: np.ndarray) -> np.ndarray:
    """Rows rounded to 255 steps in groups of 32, value by value."""
    out = np.zeros_like(x)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], 32):
            part = x[row, first : first + 32]
            scale = max(abs(float(value)) for value in part) / 127
            steps = [round(float(value) / scale) if scale else 0 for value in part]
            out[row, first : first + 32] = [scale * step for step in steps]
    return out


def value_of(codes: Codes) -> np.ndarray:
    """Value by value."""
    out = np.zeros(codes.shape)
    for row, column in np.ndindex(*codes.shape):
        group = column // codes.group
        low = 0.0 if codes.minima is None else float(codes.minima[row, group])
        step = int(codes.codes[row, column]) - codes.zero
        out[row, column] = float(codes.scales[row, group]) * step + low
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_products_are_those_of_the_plain_formula(
    level: str, kind: tuple[int, int, bool], shape: tuple[int, int]
) -> None:
    codes = random_codes(*kind, shape)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(5))
    x = torch.randn(13, shape[1], generator=torch.Generator().manual_seed(6))
    x[2] = 0
    expected = in_steps(x.numpy()) @ value_of(codes).T + bias.numpy()
    product = QuantizedLinear([pack(codes, bias)])
    np.testing.assert_allclose(product(x), expected, rtol=1e-4, atol=5e-4)
    other = torch.randn(13, shape[0], generator=torch.Generator().manual_seed(7))
    kept = other.clone()
    np.testing.assert_allclose(
        product.plus(x, other), expected + kept.numpy(), rtol=1e-4, atol=5e-4
    )
    assert torch.equal(other, kept)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_gated_products(level: str, kind: tuple[int, int, bool]) -> None:
    gate, up = (pack(random_codes(*kind, shape)) for shape in ((40, 96), (40, 96)))
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(8)) / 2
    both = QuantizedGatedLinear(gate, up)
    halves = gate.product(x), up.product(x)
    for activation, act in (("silu", F.silu(halves[0])),
                            ("gelu_tanh", F.gelu(halves[0], approximate="tanh"))):  # fmt: skip
        torch.testing.assert_close(both.gated(x, activation), act * halves[1], rtol=2e-4, atol=1e-3)
    torch.testing.assert_close(both(x), torch.cat(halves, -1), rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("kinds", [((4, 32, True), (8, 16, False)),
                                   ((8, 32, True), (8, 32, False)),
                                   ((8, 32, False), (8, 32, True))])  # fmt: skip
def test_halves_of_two_formats(level: str, kinds: tuple[tuple[int, int, bool], ...]) -> None:
    """The last two as in Q5_1 beside Q8_0: one has minima, and else they are alike."""
    gate, up = (pack(random_codes(*kind, (24, 64))) for kind in kinds)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(8)) / 2
    expected = F.silu(gate.product(x)) * up.product(x)
    found = QuantizedGatedLinear(gate, up).gated(x, "silu")
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-3)


def test_matrices_of_one_input_may_have_formats_of_their_own(level: str) -> None:
    parts = [pack(random_codes(*kind, (7, 64))) for kind in ((4, 32, True), (8, 16, False))]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(8))
    expected = torch.cat([part.product(x) for part in parts], -1)
    torch.testing.assert_close(QuantizedLinear(parts)(x), expected, rtol=1e-4, atol=5e-4)


def test_rows_may_be_bfloat16_and_part_of_wider_ones(level: str) -> None:
    part = pack(random_codes(8, 32, False, (20, 64)))
    wide = torch.randn(6, 100, generator=torch.Generator().manual_seed(3)).bfloat16()
    x = wide[:, 20:84]
    found = QuantizedLinear([part])(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, part.product(x.contiguous()), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [(8, 32, False), (4, 32, True), (4, 16, True)], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    level: str, kind: tuple[int, int, bool]
) -> None:
    if level == "torch":
        pytest.skip("torch chooses its product by the number of rows")
    product = QuantizedLinear([pack(random_codes(*kind, (80, 160)))])
    x = torch.randn(21, 160, generator=torch.Generator().manual_seed(1))
    together = product(x)
    for number in range(21):
        assert torch.equal(product(x[number : number + 1])[0], together[number])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_alone_so(level: str, poison: float) -> None:
    product = QuantizedLinear([pack(random_codes(4, 32, True, (20, 96)))])
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    clean = product(x)
    x[1, 40] = poison
    found = product(x)
    assert not torch.isfinite(found[1]).any()
    torch.testing.assert_close(found[::2], clean[::2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_rows_of_an_embedding(kind: tuple[int, int, bool]) -> None:
    codes = random_codes(*kind, (37, 96))
    table = QuantizedEmbedding(pack(codes), torch.float32)
    ids = torch.tensor([36, 0, 17, 17])
    np.testing.assert_allclose(table(ids), value_of(codes)[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-7, 1.0, 3e4])
def test_scales_outside_the_range_of_half_floats_keep_their_precision(size: float) -> None:
    codes = random_codes(4, 32, True, (16, 64))
    scaled = Codes(
        codes.codes, codes.scales / 3 * size, codes.minima / 3 * size, 4, 32, 0  # type: ignore[operator]
    )  # fmt: skip
    found, expected = pack(scaled).dense(), scaled.dense()
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_rows_of_another_width_are_refused(kernel: Any) -> None:
    product = QuantizedLinear([pack(random_codes(8, 32, False, (16, 64)))])
    for x in (torch.zeros(1, 63), torch.zeros(1, 96), torch.zeros(64)):
        with pytest.raises(ValueError, match="64 values"):
            product(x)
    with pytest.raises(ValueError, match="added"):
        product.plus(torch.zeros(2, 64), torch.zeros(2, 15))


def arrays() -> list[Any]:
    """Of one tile of 16 outputs and 32 inputs in eight bits."""
    codes, scales = np.zeros(8 * 64, np.uint8), np.zeros(16, np.float16)
    return [codes, scales, None, np.ones(16, np.float32)]


def test_the_smallest_matrix_fits(kernel: Any) -> None:
    kernel.Matrix(tuple(arrays()), 16, 1, 8, 32, 128)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_arrays_that_do_not_fit_together_are_refused(kernel: Any, at: int) -> None:
    """They would be read beyond their ends."""
    given = arrays()
    given[at] = given[at][:-1]
    with pytest.raises(ValueError, match="do not fit"):
        kernel.Matrix(tuple(given), 16, 1, 8, 32, 128)


@pytest.mark.parametrize(
    "sizes", [(17, 1, 8, 32, 128), (16, 2, 8, 32, 128), (16, 1, 4, 32, 8), (16, 1, 8, 24, 128),
              (16, 1, 8, 16, 128), (0, 1, 8, 32, 128), (16, 1, 8, 32, 0), (16, 1, 5, 32, 8)],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(kernel: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        kernel.Matrix(tuple(arrays()), *sizes)


def test_torch_rounds_rows_as_the_formula_says() -> None:
    x = torch.randn(4, 70, generator=torch.Generator().manual_seed(2))
    np.testing.assert_allclose(packed.in_codes(x), in_steps(x.numpy()), rtol=1e-5, atol=1e-6)
