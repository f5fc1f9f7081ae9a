"""Checkpoints in FP8: logits and adapters as with the same weights as floats, by the format's bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.checkpoint import open_checkpoint
from engine.models.load import load_model
from engine.models.quantise_files import write_quantized
from engine.models.registry import model_spec
from tests.engine.checkpoints import (
    reference,
    reference_logits,
    save_checkpoint,
)
from tests.engine.driver import LogitDriver
from tests.engine.models.test_family_parity import CASES as FAMILIES
from tests.engine.quantization.agreement import assert_adapter_agrees, some_ids

SHAPE = {"hidden_size": 96, "intermediate_size": 200}  # the last blocks are short
MODULE = "model.layers.1.mlp.up_proj.weight"
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def compressed(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | weights
    rows = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme,
                                      "input_activations": rows}},
    }  # fmt: skip


# By name: what the configuration says, the block of a scale (0: all), the scales' ending and their type.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int], str, torch.dtype]] = {
    "block": (DEEPSEEK | {"weight_block_size": [128, 128]}, (128, 128), "_scale_inv", torch.float32),
    "small-block": (DEEPSEEK | {"weight_block_size": [48, 32]}, (48, 32), "_scale_inv", torch.float32),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, (0, 0), "_scale", torch.float32),
    "tensor-inv": (DEEPSEEK | {"weight_block_size": None}, (0, 0), "_scale_inv", torch.bfloat16),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, (1, 0), "_scale", torch.float32),
    "compressed-tensor": (compressed(strategy="tensor"), (0, 0), "_scale", torch.bfloat16),
    "compressed-channel": (compressed(strategy="channel"), (1, 0), "_scale", torch.bfloat16),
    "compressed-group": (compressed(strategy="group", group_size=40), (1, 40), "_scale", torch.bfloat16),
    "compressed-block": (compressed(strategy="block", block_structure="128x64"), (128, 64), "_scale",
                         torch.float32),
}  # fmt: skip


def of_bits(codes: np.ndarray) -> np.ndarray:
    """e4m3: a sign, four bits of exponent with a bias of 7, three of fraction; no infinities."""
    exponent, fraction = (codes >> 3) & 15, codes & 7
    normal = 2.0 ** (exponent - 7.0) * (1 + fraction / 8)
    size = np.where(exponent == 0, 2.0**-6 * fraction / 8, normal)
    return np.where(codes & 128, -size, size)


def pair(folder: Path, kind: str, family: str = "Llama", **shape: Any) -> tuple[Path, Path]:
    """(in floats, in FP8) with random bits, value by value."""
    config, (rows, columns), ending, dtype = KINDS[kind]
    dense = save_checkpoint(folder / "dense", family, **(shape or SHAPE))
    values = load_file(dense / "model.safetensors")
    held, random = dict(values), np.random.default_rng(5)
    for name in [each for each in sorted(values) if "proj" in each and each.endswith("weight")]:
        out, width = values[name].shape
        codes = random.integers(0, 256, (out, width))
        codes = np.where((codes & 0x78) > 0x50, codes & ~0x60, codes).astype(np.uint8)  # of up to 8
        down, across = rows or out, columns or width
        size = -(-out // down), -(-width // across)
        scales = torch.from_numpy(random.uniform(0.1, 0.5, size) / width**0.5).to(dtype)
        exact = scales.double().numpy()
        of_each = exact[np.arange(out)[:, None] // down, np.arange(width) // across]
        values[name] = torch.from_numpy(of_bits(codes) * of_each).float()
        held[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        held[name + ending] = scales if rows or columns else scales.reshape(())
        if config.get("activation_scheme") == "static":
            held[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    fp8 = folder / "fp8"
    fp8.mkdir()
    save_file(values, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(held, fp8 / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((dense / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))
    return dense, fp8


def test_the_values_of_all_codes() -> None:
    codes = np.delete(np.arange(256), (0x7F, 0xFF))  # which are NaN
    read = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(of_bits(codes), read)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_same_floats(kind: str, tmp_path: Path) -> None:
    dense, fp8 = pair(tmp_path, kind)
    ids = some_ids(50)
    expected = reference_logits(reference(dense), ids)
    driver = LogitDriver(fp8, dtype="float32")
    sequence, beside = driver.sequence(ids), driver.sequence(some_ids(30))
    found = torch.cat([driver.logits(sequence, 31, (beside, 9)), driver.logits(sequence, 19)])
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "kind"), [("deepseek-v3", "small-block"), ("phi3", "block")])
def test_logits_of_other_families(family: str, kind: str, tmp_path: Path) -> None:
    """DeepSeek's own form, and matrices that are stored as one."""
    name, changes = FAMILIES[family]
    dense, fp8 = pair(tmp_path, kind, name, **changes)
    ids = some_ids(40)
    driver = LogitDriver(fp8, dtype="float32")
    expected = reference_logits(reference(dense), ids)
    torch.testing.assert_close(driver.logits(driver.sequence(ids), 40), expected, atol=2e-4, rtol=0)


def test_an_adapter_on_it(tmp_path: Path) -> None:
    dense, fp8 = pair(tmp_path, "block")
    assert_adapter_agrees(dense, fp8, reference(dense), tmp_path)


def test_it_may_be_rounded_when_it_is_loaded(tmp_path: Path) -> None:
    dense, fp8 = pair(tmp_path, "block")
    found = load_model(EngineConfig(model=str(fp8), quantization="int8"))
    same = load_model(EngineConfig(model=str(dense), quantization="int8"))
    assert found.bytes == same.bytes < load_model(EngineConfig(model=str(fp8))).bytes / 2


def broken(fp8: Path, ending: str, tensor: torch.Tensor | None) -> str:
    path = fp8 / "model.safetensors"
    tensors = load_file(path)
    del tensors[MODULE + ending]
    save_file(tensors | ({} if tensor is None else {MODULE + ending: tensor}), path,
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        load_model(EngineConfig(model=str(fp8)))
    assert "up_proj" in caught.value.message
    return caught.value.message


NAN = torch.full((200, 96), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("kind", "ending", "tensor", "said"),
    [
        ("block", "_scale_inv", None, "up_proj.weight_scale is missing"),
        ("block", "_scale_inv", torch.zeros(2, 1), "holds values that are not above 0"),
        ("block", "_scale_inv", torch.full((2, 1), float("nan")), "values that are not above 0"),
        ("block", "_scale_inv", torch.ones(2, 2), "[2, 2]: one scale for [200, 96], one for each "
         "output, or one for each block of [128, 128] is needed"),
        ("block", "_scale_inv", torch.ones(2, 1, dtype=torch.uint8), "is torch.uint8: floats"),
        ("compressed-channel", "_scale", torch.ones(199, 1), "[199, 1]: one scale for [200, 96]"),
        ("compressed-channel", "_scale", -torch.ones(200, 1), "values that are not above 0"),
        ("block", "", torch.ones(200, 96), "is torch.float32 in 2 dimensions"),
        ("block", "", torch.ones(200, 96).to(torch.float8_e5m2), "is torch.float8_e5m2"),
        ("block", "", torch.ones(199, 96).to(torch.float8_e4m3fn), "has shape [199, 96]"),
        ("block", "", NAN, "holds NaN or infinite values"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_together_are_refused(
    kind: str, ending: str, tensor: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    assert said in broken(pair(tmp_path, kind)[1], ending, tensor)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (DEEPSEEK | {"fmt": "e5m2"}, "fp8 in 'e5m2' are not supported"),
        (DEEPSEEK | {"weight_block_size": [128]}, r"blocks of \[128\], not two sizes"),
        (
            DEEPSEEK | {"weight_block_size": [128, 0]},
            r"weight_block_size is \[128, 0\]: it must be",
        ),
        (compressed(strategy="channel", num_bits=4), "type 'float' in 4 bits"),
        (compressed(strategy="channel", type="int"), "type 'int' in 8 bits"),
        (compressed(strategy="block"), "blocks of None, not two sizes"),
    ],
)
def test_schemes_beyond_what_is_read_are_refused_by_name(
    declared: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = json.loads((save_checkpoint(tmp_path) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=said):
        model_spec(config | {"quantization_config": declared})


def test_what_is_written_means_what_the_format_says(tmp_path: Path) -> None:
    base, target = save_checkpoint(tmp_path / "base", **SHAPE), tmp_path / "fp8"
    weights = load_file(base / "model.safetensors")
    weights[MODULE][7] = 0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    written = write_quantized(base, target, "fp8")
    tensors = load_file(target / "model.safetensors")
    assert written == sum(tensor.nbytes for tensor in tensors.values())
    codes, scale = tensors[MODULE], tensors[MODULE + "_scale"]
    assert (codes.dtype, scale.shape) == (torch.float8_e4m3fn, (200, 1))
    values = of_bits(codes.view(torch.uint8).numpy()) * scale.double().numpy()
    # Half of the last of three bits of fraction, or half of the smallest step.
    room = np.maximum(weights[MODULE].abs().numpy() / 16, scale.numpy() * 2**-10) * 1.0001
    assert (np.abs(values - weights[MODULE].numpy()) <= room).all() and not values[7].any()
    assert np.allclose(np.abs(values).max(1), weights[MODULE].abs().amax(1), rtol=1e-5)
    assert codes.view(torch.uint8).numpy().min() >= 0 and tensors["model.norm.weight"].numel() == 96
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized"
    scheme = config["config_groups"]["group_0"]["weights"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, "float", "channel")
    source = open_checkpoint(target).source
    torch.testing.assert_close(
        source.read(MODULE, torch.float32).double(), torch.from_numpy(values)
    )
    source.close()
    ids = some_ids(40)
    driver = LogitDriver(target, dtype="float32")
    near, plain = driver.logits(driver.sequence(ids), 40), reference_logits(reference(base), ids)
    assert 0 < (near - plain).abs().mean() < 0.15 * plain.std()
    with pytest.raises(ConfigError, match="a text is of no use for fp8"):
        write_quantized(base, tmp_path / "other", "fp8", tmp_path / "text")
