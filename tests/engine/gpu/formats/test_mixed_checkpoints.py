"""Checkpoints in FP8 and with experts through the GPU's runner: answers by `transformers`."""

from pathlib import Path

import pytest

from engine.backends.gpu.launch import capability
from engine.backends.layers.device.linear import DeviceLinear
from engine.backends.layers.device.mixture import DeviceMixture
from tests.engine.checkpoints import reference, save_checkpoint
from tests.engine.models.test_family_parity import CASES
from tests.engine.quantization import test_float8
from tests.engine.quantization.agreement import some_ids

pytest.importorskip("triton")
from engine.backends.gpu.formats import launch
from tests.engine.gpu.formats.device_driver import assert_answers, device_driver, linears, stand_in
from tests.engine.gpu.frozen_graph import FrozenGraph

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")

ONE_LAYER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
PROMPTS = [some_ids(19), some_ids(5)]


@pytest.mark.parametrize("kind", ["block", "compressed-channel"])
def test_fp8_on_a_device_that_does_not_multiply_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stay floats there, so the answers are those of the weights alone."""
    dense, quantised = test_float8.pair(tmp_path, kind, **ONE_LAYER)
    assert capability() >= 89, "without a device, rows would be rounded"
    monkeypatch.setattr(launch, "capability", lambda: 80)
    with stand_in(monkeypatch):
        driver = device_driver(quantised)
        assert all(isinstance(each, DeviceLinear) for each in linears(driver))
        assert driver.runner._model.bytes < (64 * 211 * 2 + 64 * 64 * 4 + 64 * 96 * 3) * 4 * 0.7
        assert_answers(driver, reference(dense), PROMPTS[1:])


def test_scales_of_groups_that_no_span_serves_make_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 40 inputs."""
    dense, quantised = test_float8.pair(
        tmp_path, "compressed-group", hidden_size=80, intermediate_size=120, num_hidden_layers=1
    )
    with stand_in(monkeypatch):
        driver = device_driver(quantised)
        assert not any(isinstance(each, DeviceLinear) for each in linears(driver))
        assert_answers(driver, reference(dense), PROMPTS[1:])


@pytest.mark.parametrize(
    ("case", "quantization"),
    [
        pytest.param("qwen2-moe", "none", marks=pytest.mark.proof),
        ("mixtral", "none"),
        ("qwen3-moe", "int4"),
    ],
)
def test_experts(
    case: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, shape = CASES[case]
    layers = {"num_hidden_layers": 1} if case == "mixtral" else {}
    checkpoint = save_checkpoint(tmp_path, family, **(shape | layers))
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint, quantization=quantization)
        mixtures = [
            (layer, block.mixture)
            for layer, block in enumerate(driver.runner._model.decoder.blocks)
            if block.mixture is not None
        ]
        assert mixtures and all(isinstance(each, DeviceMixture) for _, each in mixtures)
        if quantization == "none":
            assert_answers(driver, reference(checkpoint), PROMPTS)
        else:  # the same steps; `test_experts.py` has the values
            sequence = driver.sequence(PROMPTS[1])
            driver.run([sequence, driver.sequence(PROMPTS[0])], count=2)
        computed = sum(len(each) + 1 for each in PROMPTS)
        rows = driver.runner.expert_rows
        assert list(rows) == [layer for layer, _ in mixtures]
        for layer, mixture in mixtures:
            assert sum(rows[layer]) == mixture.active * computed


def test_a_recorded_step_counts_its_rows_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who records a graph while it serves runs the step, and replays it."""
    family, shape = CASES["mixtral"]
    checkpoint = save_checkpoint(tmp_path, family, **(shape | {"num_hidden_layers": 1}))
    with stand_in(monkeypatch):
        monkeypatch.setattr("engine.runners.gpu.runner.PlainReplay", FrozenGraph)
        monkeypatch.setattr("engine.runners.gpu.runner.CudaGraph", FrozenGraph)
        driver = device_driver(checkpoint)
        sequence = driver.sequence(PROMPTS[0])
        driver.run([sequence], count=3)
        assert driver.runner._graphs._graphs
        (mixture,) = (block.mixture for block in driver.runner._model.decoder.blocks)
        assert mixture is not None
        assert sum(driver.runner.expert_rows[0]) == mixture.active * (len(PROMPTS[0]) + 2)
