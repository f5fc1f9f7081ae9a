"""FP8 weights, and products of rows rounded to 8 bits, by the kernels and by torch, against formulas in
numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.layers.device.linear import DeviceLinear, product_reference
from engine.backends.layers.device.matrix import DeviceMatrix, from_codes
from engine.backends.layers.packed import Codes
from tests.engine.gpu.device import DEVICE, close
from tests.engine.quantization.test_float8 import of_bits

launch = pytest.importorskip("engine.backends.gpu.formats.launch")

FLOATS = [bits for bits in range(256) if bits & 127 != 127]


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, width, generator=generator).to(DEVICE, dtype)


def matrix(kind: str, out: int, width: int, group: int, **how: Any) -> tuple[DeviceMatrix, Any]:
    """In e4m3 or int8 with random bits, and its values in float64."""
    random = np.random.default_rng(width)
    groups = -(-width // group)
    scales = random.uniform(0.5, 1.5, (out, groups)).astype(np.float32) / 256
    index = np.arange(width) // group
    if kind == "e4m3":
        codes = random.choice(FLOATS, (out, width)).astype(np.uint8)
        values = of_bits(codes.astype(int)) * scales.astype(np.float64)[:, index]
    else:
        scales = scales.astype(np.float16)
        codes = random.integers(0, 256, (out, width)).astype(np.uint8)
        values = (codes.astype(int) - 128) * scales.astype(np.float64)[:, index]
    held = Codes(
        codes=torch.from_numpy(codes), scales=torch.from_numpy(scales.astype(np.float32)), minima=None,
        bits=8, group=-(-width // 32) * 32 if groups == 1 else group, zero=0 if kind == "e4m3" else 128,
        kind=kind if kind == "e4m3" else "int", rounded_rows=how.get("rounded", False),
    )  # fmt: skip
    bias = torch.linspace(-1, 1, out) if out % 2 else None
    return from_codes(held, bias).to(torch.device(DEVICE)), values


def rounded(x: torch.Tensor, to: str, group: int) -> np.ndarray:
    """Each group of a row to the nearest code of its own scale, in float64."""
    found = x.double().cpu().numpy().copy()
    sizes = of_bits(np.arange(127))
    for row in found:
        for first in range(0, len(row), group):
            part = row[first : first + group]
            most = np.abs(part).max()
            if most == 0:
                continue
            scale = np.float32(most) / np.float32(127 if to == "int8" else 448)
            steps = (part.astype(np.float32) / scale).astype(np.float64)
            if to == "int8":
                steps = np.rint(steps)
            else:
                distance = np.abs(np.abs(steps)[:, None] - sizes)
                steps = np.sign(steps) * sizes[distance.argmin(1)]
            part[:] = steps * scale
    return found


def check(got: torch.Tensor, x: np.ndarray, values: np.ndarray, held: DeviceMatrix) -> None:
    want = torch.from_numpy(x @ values.T)
    if held.bias is not None:
        want += held.bias.double().cpu()
    close(got, want.to(got.dtype).to(DEVICE))


def both(x: torch.Tensor, held: DeviceMatrix) -> list[torch.Tensor]:
    return [launch.quantized_linear(x, DeviceLinear([held])), DeviceLinear([held])(x)]


@pytest.mark.parametrize(
    ("count", "out", "width", "group", "dtype"),
    [
        (1, 33, 256, 128, torch.float32),
        (33, 33, 256, 128, torch.bfloat16),
        (2, 40, 104, 104, torch.float16),
        (2, 7, 192, 96, torch.float32),
    ],
)
def test_e4m3_with_rows_in_floats(
    count: int, out: int, width: int, group: int, dtype: torch.dtype
) -> None:
    held, values = matrix("e4m3", out, width, group)
    x = rows(count, width, dtype)
    for got in both(x, held):
        check(got, x.double().cpu().numpy(), values, held)


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize(
    ("count", "out", "width", "group"), [(2, 33, 128, 128), (17, 40, 100, 100), (2, 18, 192, 64)]
)
def test_rows_rounded_to_8_bits(kind: str, count: int, out: int, width: int, group: int) -> None:
    if kind == "int8":
        group = width
    held, values = matrix(kind, out, width, group, rounded=True)
    assert launch.rounds(held)
    x = rows(count, width) * torch.linspace(0.1, 9, count, device=DEVICE)[:, None]
    x[0, :group] = 0
    for got in both(x, held):
        check(got, rounded(x, kind, group), values, held)


def test_a_block_that_is_not_a_power_of_two() -> None:
    held, values = matrix("e4m3", 20, 200, 96, rounded=True)
    x = rows(3, 200)
    for got in both(x, held):
        check(got, rounded(x, "e4m3", 96), values, held)


def test_a_device_that_does_not_multiply_e4m3_keeps_rows_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, values = matrix("e4m3", 20, 128, 128, rounded=True)
    integers, _ = matrix("int8", 20, 128, 128, rounded=True)
    monkeypatch.setattr(launch, "capability", lambda: 80)
    assert not launch.rounds(held) and launch.rounds(integers)
    x = rows(3, 128)
    got = launch.quantized_linear(x, DeviceLinear([held]))
    check(got, x.double().cpu().numpy(), values, held)
    close(got, product_reference(x, held, rounded=False))


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_not_rounded_away(kind: str, wrong: float) -> None:
    held, _ = matrix(kind, 20, 64, 64, rounded=True)
    x = rows(2, 64)
    x[1, 40] = wrong
    for got in both(x, held):
        assert got[0].isfinite().all() and not got[1].isfinite().any()


def test_matrices_of_one_input_round_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = matrix("int8", 20, 64, 64, rounded=True)
    calls = []
    original = launch.round_rows
    monkeypatch.setattr(launch, "round_rows", lambda *given: calls.append(1) or original(*given))
    launch.quantized_linear(rows(2, 64), DeviceLinear([held, held, held]))
    assert len(calls) == 1
