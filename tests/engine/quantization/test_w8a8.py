"""Checkpoints whose weights and activations are int8 (SmoothQuant's, `int-quantized`), against the same
weights as floats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.models.load import load_model
from tests.engine.checkpoints import (
    reference,
    reference_logits,
    save_checkpoint,
)
from tests.engine.driver import LogitDriver
from tests.engine.quantization.agreement import (
    assert_adapter_agrees,
    assert_logits_of_the_dense_model,
    some_ids,
)
from tests.engine.quantization.test_models import needs_kernel, round_inputs

ODD = {"hidden_size": 80, "intermediate_size": 104}
MODULE = "model.layers.1.mlp.up_proj.weight"


def pair(folder: Path, dynamic: bool = True) -> tuple[Path, Path]:
    """(in floats, in int8), as llm-compressor writes it: a scale an output, in bfloat16."""
    dense = save_checkpoint(folder / "dense", **ODD)
    values = load_file(dense / "model.safetensors")
    held, random = dict(values), np.random.default_rng(5)
    for name in [each for each in sorted(values) if "_proj" in each]:
        out, width = values[name].shape
        codes = random.integers(-128, 128, (out, width))
        scale = torch.from_numpy(random.uniform(0.5, 1.5, (out, 1)) / 80 / width**0.5).bfloat16()
        values[name] = torch.from_numpy(codes * scale.double().numpy()).float()
        held[name] = torch.from_numpy(codes.astype(np.int8))
        held[f"{name}_scale"] = scale
        if not dynamic:
            held[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.02])
    target = folder / "int8"
    target.mkdir()
    save_file(values, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": dynamic,
            "strategy": "token" if dynamic else "tensor"}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return dense, target


@pytest.mark.parametrize("dynamic", [True, False])
def test_logits_are_those_of_the_same_floats(dynamic: bool, tmp_path: Path) -> None:
    dense, target = pair(tmp_path, dynamic)
    assert_logits_of_the_dense_model(dense, target)


def served(dense: Path) -> Any:
    """With the inputs of its products rounded, each row by itself."""
    model = reference(dense)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            round_inputs(module)
    return model


@needs_kernel
@pytest.mark.parametrize("dynamic", [True, False])
def test_codes_are_computed_as_they_are_stored(dynamic: bool, tmp_path: Path) -> None:
    """Rows are rounded by scales of their own, nearer than a scale a row or a fixed one."""
    dense, target = pair(tmp_path, dynamic)
    ids = some_ids(50)
    expected = reference_logits(served(dense), ids)
    of_rounding = (expected - reference_logits(reference(dense), ids)).abs().mean()
    driver = LogitDriver(target, dtype="float32")
    error = (driver.logits(driver.sequence(ids), 50) - expected).abs().mean()
    assert error < of_rounding / 2, "a sum in another order may round an input to another step"
    floats = load_model(EngineConfig(model=str(target), quantization="none")).bytes
    table = 211 * 80 * 4 * 2
    assert load_model(EngineConfig(model=str(target))).bytes - table < (floats - table) * 0.3


@needs_kernel
def test_an_adapter_on_it(tmp_path: Path) -> None:
    dense, target = pair(tmp_path)
    assert_adapter_agrees(dense, target, served(dense), tmp_path)


@pytest.mark.parametrize(
    ("ending", "tensor", "said"),
    [
        ("", torch.zeros(104, 80), "is torch.float32: int8 was expected"),
        ("", torch.zeros(103, 80, dtype=torch.int8), r"has shape \[103, 80\]"),
        ("_scale", torch.zeros(104, 1), "values that are not above 0"),
        ("_scale", torch.full((104, 1), float("nan")), "values that are not above 0"),
        ("_scale", torch.ones(103, 1), "a scale for each of equal groups"),
        ("_scale", None, "is torch.int8: only float weights"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(
    ending: str, tensor: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    path = pair(tmp_path)[1] / "model.safetensors"
    tensors = load_file(path)
    del tensors[MODULE + ending]
    save_file(
        tensors | ({} if tensor is None else {MODULE + ending: tensor}),
        path,
        metadata={"format": "pt"},
    )
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(EngineConfig(model=str(path.parent)))
    assert "up_proj" in caught.value.message
