"""Checkpoints in codes through the GPU's runner: answers by `transformers` for the same weights."""

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from engine.backends.layers.device.linear import DeviceLinear
from engine.backends.layers.linear import DenseLinear
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.runners.cpu.runner import load_runner
from tests.engine.checkpoints import reference, reference_greedy, save_adapter, save_checkpoint
from tests.engine.quantization import test_w8a8
from tests.engine.quantization.agreement import PROMPT, some_ids
from tests.engine.quantization.grouped_checkpoints import Random, pair

pytest.importorskip("triton")
from tests.engine.gpu.formats.device_driver import assert_answers, device_driver, linears, stand_in

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
ODD = {"hidden_size": 80, "intermediate_size": 104, "num_hidden_layers": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "awq": (SHAPE, {"method": "awq"}),
    "gptq-whole": (ODD, {"group": -1}),
    "gptq-8": (ODD | {"intermediate_size": 112}, {"bits": 8, "group": 16, "symmetric": True}),
    "gptq-sorted": (SHAPE, {"sorted_groups": True}),
    "gptq-sorted-apart": (SHAPE, {"sorted_groups": True, "symmetric": True, "apart": True}),
}
PROMPTS = [some_ids(19), some_ids(5)]


def served(model: Any, by_module: dict[str, Random]) -> Any:
    """The model with its weights as codes hold them."""
    for name, module in model.named_modules():
        if f"{name}." in by_module:
            module.weight.data = torch.from_numpy(by_module[f"{name}."].served).float()
    return model


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, marks=() if each != "gptq-sorted" else pytest.mark.proof)
        for each in CASES
    ],
)
def test_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, quantised, by_module = pair(tmp_path, CASES[case][0], **CASES[case][1])
    model = served(reference(dense), by_module)
    with stand_in(monkeypatch):
        driver = device_driver(quantised)
        assert all(isinstance(each, DeviceLinear) for each in linears(driver))
        assert_answers(driver, model, PROMPTS)


@pytest.mark.parametrize("family", ["Qwen2", "Phi3"])
def test_biases_and_matrices_stored_as_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2}
    dense, quantised, by_module = pair(tmp_path, shape, family=family, method="awq")
    model = served(reference(dense), by_module)
    with stand_in(monkeypatch):
        assert_answers(device_driver(quantised), model, PROMPTS[1:])


def test_an_adapter_on_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, quantised, by_module = pair(tmp_path, SHAPE, method="awq")
    model = served(reference(dense), by_module)
    adapter = save_adapter(dense, tmp_path / "adapter", rank=6, seed=4)
    expected = [reference_greedy(model, PROMPT, 4)]
    with warnings.catch_warnings():  # before the stand-in, which peft would take for a GPU
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    expected.append(reference_greedy(model, PROMPT, 4))
    with stand_in(monkeypatch):
        driver = device_driver(quantised)
        plain = driver.sequence(PROMPT)
        adapted = driver.sequence(PROMPT, adapter=driver.adapter(adapter, 0))
        driver.run([adapted, plain], count=4)
    assert [plain.output, adapted.output] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.3), ("int4", 0.2), ("none", 1.0)])
def test_rounded_when_loaded(
    quantization: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the codes' own values in floats; `none` makes the matrices of a checkpoint floats."""
    dense = save_checkpoint(tmp_path / "dense", **SHAPE)
    model = reference(dense)
    with stand_in(monkeypatch):
        driver = device_driver(dense, quantization=quantization)
        kind = DenseLinear if quantization == "none" else DeviceLinear
        assert all(isinstance(each, kind) for each in linears(driver))
        block = driver.runner._model.decoder.blocks[0]
        layer = model.model.layers[0]
        for linear, modules in (
            (block.qkv.linear, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
            (block.o.linear, [layer.self_attn.o_proj]),
            (block.gate_up.linear, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            (block.down.linear, [layer.mlp.down_proj]),
        ):  # fmt: skip
            if not isinstance(linear, DeviceLinear):
                continue
            values = torch.cat([part.dense() for part in linear.parts])
            stored = torch.cat([module.weight.data for module in modules])
            assert sum(part.bytes for part in linear.parts) <= most * stored.nbytes
            assert (values - stored).norm() < 0.12 * stored.norm()
            for module, rows in zip(
                modules, values.split([len(m.weight) for m in modules]), strict=True
            ):
                module.weight.data = rows
        head = driver.runner._model.decoder.head
        if isinstance(head, DeviceLinear):
            model.lm_head.weight = torch.nn.Parameter(head.parts[0].dense())
        assert_answers(driver, model, PROMPTS[1:])


def test_a_group_size_that_does_not_divide_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, quantised, _ = pair(tmp_path, SHAPE | {"intermediate_size": 96}, group=32)
    config = quantised / "config.json"
    for size, words in ((40, "not whole groups of 40"), (8, "does not have 8 inputs in each")):
        config.write_text(config.read_text().replace('"group_size": 32', f'"group_size": {size}'))
        with stand_in(monkeypatch), pytest.raises(CheckpointError, match=words) as caught:
            load_runner(EngineConfig(model=str(quantised), device="cuda", num_blocks=8))
        assert "q_proj." in str(caught.value)
        config.write_text(config.read_text().replace(f'"group_size": {size}', '"group_size": 32'))


def test_int8_of_compressed_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, quantised = test_w8a8.pair(tmp_path)
    model = reference(dense)

    def rounded(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = given[0].abs().amax(-1, keepdim=True) / 127
        return ((given[0] / scale).round() * scale,)

    for name, module in model.named_modules():
        if "_proj" in name:
            module.register_forward_pre_hook(rounded)
    with stand_in(monkeypatch):
        # A sum in another order may round an input to the next step.
        assert_answers(device_driver(quantised), model, PROMPTS[1:], atol=1e-2)
