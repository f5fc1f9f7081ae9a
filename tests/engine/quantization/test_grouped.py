"""Checkpoints by GPTQ and AWQ: logits, greedy tokens and adapters as with the same weights in floats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.compiled import linear
from engine.backends.layers.packed import pack
from engine.backends.layers.quantised_linear import QuantizedEmbedding, QuantizedLinear
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.checkpoint import open_checkpoint
from engine.models.load import load_model
from tests.engine.checkpoints import reference, reference_logits
from tests.engine.driver import LogitDriver, alone_and_together
from tests.engine.models.test_family_parity import CASES as FAMILIES
from tests.engine.quantization.agreement import (
    assert_adapter_agrees,
    assert_logits_of_the_dense_model,
    some_ids,
)
from tests.engine.quantization.grouped_checkpoints import Random, pair
from tests.engine.quantization.test_models import needs_kernel, rounded

SHAPE = {"hidden_size": 96, "intermediate_size": 224}
ODD = {"hidden_size": 80, "intermediate_size": 104}
SMALL = {"hidden_size": 80, "intermediate_size": 112}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "awq": (SHAPE, {"method": "awq"}),
    "awq-16": (SMALL, {"method": "awq", "group": 16}),
    "awq-whole": (ODD, {"method": "awq", "group": -1}),
    "gptq": (SHAPE, {}),
    "gptq-second": (SHAPE, {"second": True}),
    "gptq-symmetric": (SHAPE, {"symmetric": True}),
    "gptq-whole": (ODD, {"group": -1}),
    "gptq-8": (SHAPE, {"bits": 8}),
    "gptq-8-symmetric": (SMALL, {"bits": 8, "group": 16, "symmetric": True}),
    "gptq-sorted": (SHAPE, {"sorted_groups": True}),
    "gptq-sorted-8": (SMALL, {"bits": 8, "group": 16, "sorted_groups": True}),
    "gptq-sorted-apart": (SHAPE, {"sorted_groups": True, "symmetric": True, "apart": True}),
}
# In whole groups, and in words; a family's other sizes are its own.
WHOLE = {"hidden_size": 96, "intermediate_size": 96, "moe_intermediate_size": 32}
MODULE = "model.layers.1.mlp.up_proj."


def as_served(model: Any, by_module: dict[str, Random]) -> None:
    """Inputs are rounded as the products do it: in groups of 32, after they were sorted."""
    for name, module in model.named_modules():
        matrix = by_module.get(f"{name}.")
        if matrix is None:
            continue
        assert np.abs(matrix.served - matrix.values).max() < 2**-11 * np.abs(matrix.values).max()
        module.weight.data = torch.from_numpy(matrix.served).float()
        order = torch.from_numpy(np.argsort(matrix.index, kind="stable"))

        def hook(_: Any, given: tuple[torch.Tensor], order: torch.Tensor = order) -> Any:
            found = torch.empty_like(given[0])
            found[..., order] = rounded(given[0][..., order])
            return (found,)

        module.register_forward_pre_hook(hook)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_same_floats(case: str, tmp_path: Path) -> None:
    dense, quantised, _ = pair(tmp_path, CASES[case][0], **CASES[case][1])
    assert_logits_of_the_dense_model(dense, quantised)


@pytest.mark.parametrize("case", ["awq", "gptq-sorted"])
@pytest.mark.parametrize("family", ["qwen2", "phi3", "qwen3-moe"])
def test_biases_matrices_stored_as_one_and_experts(case: str, family: str, tmp_path: Path) -> None:
    name, sizes = FAMILIES[family]
    sizes = sizes | WHOLE
    dense, quantised, _ = pair(tmp_path, sizes, family=name, **CASES[case][1])
    ids = some_ids(40)
    expected = reference_logits(reference(dense), ids)
    driver = LogitDriver(quantised, dtype="float32", quantization="none")
    found = driver.logits(driver.sequence(ids), 40)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    driver = LogitDriver(quantised, dtype="float32")
    near = driver.logits(driver.sequence(ids), 40)
    assert 0 <= (near - expected).abs().mean() < 0.1 * expected.std(), "but for rounded rows"


@needs_kernel
@pytest.mark.parametrize("case", CASES)
def test_codes_are_computed_as_they_are_stored(case: str, tmp_path: Path) -> None:
    dense, quantised, by_module = pair(tmp_path, CASES[case][0], **CASES[case][1])
    model, ids = reference(dense), some_ids(50)
    as_served(model, by_module)
    expected = reference_logits(model, ids)
    driver = LogitDriver(quantised, dtype="float32")
    error = (driver.logits(driver.sequence(ids), 50) - expected).abs().mean()
    of_rounding = (expected - reference_logits(reference(dense), ids)).abs().mean()
    assert error < of_rounding / 2, "a sum in another order may round an input to another step"
    floats = load_model(EngineConfig(model=str(quantised), quantization="none")).bytes
    served = load_model(EngineConfig(model=str(quantised))).bytes
    table = 211 * CASES[case][0]["hidden_size"] * 4 * 2
    bits = CASES[case][1].get("bits", 4)
    assert (served - table) < (floats - table) * {4: 0.22, 8: 0.4}[bits], "not grown to floats"


@pytest.mark.parametrize("case", CASES)
def test_products_of_its_matrices(level: str, case: str, tmp_path: Path) -> None:
    _, quantised, by_module = pair(tmp_path, CASES[case][0], **CASES[case][1])
    source = open_checkpoint(quantised).source
    for stem, matrix in by_module.items():
        codes = source.codes(f"{stem}weight")
        assert codes is not None
        x = torch.randn(5, codes.shape[1], generator=torch.Generator().manual_seed(3))
        order = torch.from_numpy(np.argsort(matrix.index, kind="stable"))
        columns = torch.from_numpy(matrix.served).float()[:, order]
        expected = rounded(x[:, order]) @ columns.t()
        torch.testing.assert_close(QuantizedLinear([pack(codes)])(x), expected, atol=1e-4, rtol=0)
        embedded = QuantizedEmbedding(pack(codes), torch.float32)(torch.tensor([0, 5]))
        torch.testing.assert_close(embedded.double(), torch.from_numpy(matrix.served[[0, 5]]))
    source.close()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("case", ["awq", "gptq-sorted"])
def test_an_adapter_on_it(
    case: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(linear, "kernel", None)
    dense, quantised, by_module = pair(tmp_path, CASES[case][0], **CASES[case][1])
    model = reference(dense)
    if compiled and linear.kernel is not None:
        as_served(model, by_module)
    assert_adapter_agrees(dense, quantised, model, tmp_path)


@needs_kernel
def test_answers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    quantised = pair(tmp_path, *CASES["gptq-sorted"][:1], **CASES["gptq-sorted"][1])[1]
    alone, together = alone_and_together(quantised, [some_ids(9 + 7 * n)[n:] for n in range(5)])
    assert together == alone


def test_a_zero_point_of_0_that_was_stored_less_one(tmp_path: Path) -> None:
    """All four bits are set then; what wrote it set the bits above them too."""
    quantised = pair(tmp_path, SHAPE)[1]
    change(quantised, {"qzeros": lambda words: torch.full_like(words, -1)})
    source = open_checkpoint(quantised).source
    codes = source.codes(f"{MODULE}weight")
    assert codes is not None and codes.minima is None and codes.zero == 0
    source.close()


def change(folder: Path, changes: dict[str, Any], **config: Any) -> None:
    """Tensors of MODULE (None: left out), and entries of quantization_config (None: likewise)."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, by in changes.items():
        stored = tensors.pop(MODULE + name)
        if by is not None:
            tensors[MODULE + name] = by(stored).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    entries = whole["quantization_config"] | config
    whole["quantization_config"] = {k: v for k, v in entries.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(whole))


def with_value(value: float) -> Any:
    def changed(scales: torch.Tensor) -> torch.Tensor:
        scales[1, 3] = value
        return scales

    return changed


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("awq", {"scales": with_value(0)}, "scales holds values that are zero, NaN or infinite"),
        ("gptq", {"scales": with_value(float("nan"))}, "scales holds values that are zero, NaN"),
        ("gptq", {"scales": with_value(float("inf"))}, "scales holds values that are zero, NaN"),
        ("awq", {"scales": lambda s: s[:-1]}, r"scales is torch.float16 \[2, 224\]: floats of"),
        ("awq", {"scales": None}, "up_proj.scales is missing"),
        ("gptq", {"scales": lambda s: s.int()}, "scales is torch.int32"),
        ("awq", {"qweight": lambda w: w[:, :-1]}, r"has shape \[216, 96\], the configuration asks"),
        ("gptq", {"qweight": lambda w: w[:-1]}, r"has shape \[224, 88\], the configuration asks"),
        ("gptq", {"qweight": lambda w: w.short()}, "qweight is torch.int16"),
        ("gptq", {"qweight": lambda w: w[0]}, "two sizes are needed"),
        ("awq", {"qzeros": lambda w: w[:, :-1]}, "qzeros has shape .*4 bits for each of"),
        ("gptq", {"qzeros": lambda w: w[:-1]}, "qzeros has shape .*4 bits for each of"),
        ("gptq", {"qzeros": None}, "up_proj.qzeros is missing"),
        ("gptq-symmetric", {"qzeros": lambda w: w + 1}, "zero points other than 8, but config.json"),
        ("gptq-sorted", {"g_idx": None}, "up_proj.g_idx is missing"),
        ("gptq-sorted", {"g_idx": lambda i: i[:-1]}, "g_idx is torch.int32 .*each of 96 inputs"),
        ("gptq-sorted", {"g_idx": lambda i: i * 0}, "g_idx does not have 32 inputs in each of 3"),
        ("gptq", {"g_idx": lambda i: i + 1}, "g_idx does not have 32 inputs in each of 3"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_together_are_refused(
    case: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    quantised = pair(tmp_path, CASES[case][0], **CASES[case][1])[1]
    change(quantised, changes)
    for quantization in ("auto", "none"):
        with pytest.raises(CheckpointError, match=said) as caught:
            load_model(EngineConfig(model=str(quantised), quantization=quantization))
        assert "up_proj" in caught.value.message


@pytest.mark.parametrize(
    ("case", "config", "said"),
    [
        ("gptq", {"bits": 3}, "gptq with 3 bits are not supported"),
        ("gptq", {"bits": None}, "gptq with None bits"),
        ("awq", {"bits": 8}, "awq with 8 bits are not supported"),
        ("awq", {"version": "gemv"}, "awq with the packing 'gemv'"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq with the packing 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "gptq with the packing 'marlin'"),
        ("gptq", {"group_size": 0}, "a group size of 0"),
        ("gptq", {"group_size": "32"}, "group_size is '32': it must be a whole number"),
        ("gptq", {"dynamic": {r"-:.*head": {}, r".*down": {"bits": 8}}}, r"their own for \.\*down"),
        ("gptq", {"group_size": 64}, "which are not whole groups of 64"),
        ("gptq", {"group_size": 48}, "48"),
        ("awq", {"zero_point": False}, "zero points other than 8"),
        ("gptq", {"sym": True}, "zero points other than 8"),
    ],
)
def test_schemes_beyond_what_is_computed_are_refused_by_name(
    case: str, config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    quantised = pair(tmp_path, CASES[case][0], **CASES[case][1])[1]
    change(quantised, {}, **config)
    with pytest.raises(CheckpointError, match=said):
        load_model(EngineConfig(model=str(quantised)))


def test_it_is_not_rounded_again(tmp_path: Path) -> None:
    quantised = pair(tmp_path, SHAPE, method="awq")[1]
    with pytest.raises(ConfigError, match="is stored as awq, 4 bits: leave it at auto"):
        load_model(EngineConfig(model=str(quantised), quantization="int8"))
