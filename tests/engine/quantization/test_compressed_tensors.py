"""Checkpoints in compressed-tensors' integer formats: written, read back, and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.layers.packed import pack
from engine.backends.layers.quantise import quantize
from engine.backends.layers.quantised_linear import QuantizedLinear
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.checkpoint import open_checkpoint
from engine.models.formats.compressed_tensors import packed
from engine.models.load import load_model
from engine.models.quantise_files import write_quantized
from engine.models.registry import model_spec
from gateway.cli.main import main
from tests.engine.checkpoints import VOCAB, reference, reference_logits, save_checkpoint
from tests.engine.driver import LogitDriver
from tests.engine.quantization.test_models import rounded

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"), intermediate_size=96)


def words_to_codes(words: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Value by value, around 0: the first code of a word is in its lowest bits."""
    out = torch.zeros(words.shape[0], width)
    for row in range(words.shape[0]):
        for column in range(width):
            word = int(words[row, column * bits // 32]) & 0xFFFFFFFF
            out[row, column] = (word >> (column * bits % 32)) & ((1 << bits) - 1)
    return out - (1 << (bits - 1))


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_what_is_written_means_what_the_format_says(base: Path, tmp_path: Path, to: str) -> None:
    target = tmp_path / "out"
    written = write_quantized(base, target, to)
    bits, tensors = {"int8": 8, "int4": 4}[to], load_file(target / "model.safetensors")
    assert written == sum(tensor.nbytes for tensor in tensors.values())
    config = json.loads((target / "config.json").read_text())
    scheme = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (scheme["num_bits"], scheme["group_size"], scheme["symmetric"]) == (
        bits,
        32,
        to == "int8",
    )
    out, width = tensors[NAME + "_shape"].tolist()
    scale = tensors[NAME + "_scale"].float().repeat_interleave(32, 1)
    codes = words_to_codes(tensors[NAME + "_packed"], bits, width)
    if to == "int4":
        zero = words_to_codes(tensors[NAME + "_zero_point"].t(), bits, out).t()
        codes = codes - zero.repeat_interleave(32, 1)
    plain = load_file(base / "model.safetensors")
    expected = quantize(plain[NAME], to, zero_points=True).dense()
    torch.testing.assert_close(codes * scale, expected, rtol=1e-5, atol=1e-6)
    assert (expected - plain[NAME]).norm() < {"int8": 0.01, "int4": 0.1}[to] * plain[NAME].norm()
    source = open_checkpoint(target).source
    torch.testing.assert_close(source.read(NAME, torch.float32), expected, rtol=1e-5, atol=1e-6)
    source.close()


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("served", ["auto", "none"])
def test_logits_after_reading_back(base: Path, tmp_path: Path, to: str, served: str) -> None:
    target = tmp_path / "out"
    write_quantized(base, target, to)
    source = open_checkpoint(target).source
    model = reference(base)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.data = source.read(name, torch.float32)
    source.close()
    ids = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = reference_logits(model, ids)
    driver = LogitDriver(target, dtype="float32", quantization=served)
    found = driver.logits(driver.sequence(ids), 50)
    close = 1e-4 if served == "none" else 0.06  # rows of products are rounded too
    assert (found - expected).abs().mean() < close * expected.std()
    smaller = load_model(EngineConfig(model=str(target))).bytes
    assert smaller < load_model(EngineConfig(model=str(base))).bytes / 2


def test_matrices_that_a_checkpoint_holds_as_one(tmp_path: Path) -> None:
    """Phi-3's are written whole; their rows are read as if rounded when loaded."""
    base = save_checkpoint(tmp_path / "base", "Phi3", intermediate_size=96)
    write_quantized(base, tmp_path / "out", "int8")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for module in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        assert f"model.layers.2.{module}.weight_packed" in tensors
    ids = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(4)).tolist()
    source = open_checkpoint(tmp_path / "out").source
    model = reference(base)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.data = source.read(name, torch.float32)
    source.close()
    driver = LogitDriver(tmp_path / "out", dtype="float32", quantization="none")
    found = driver.logits(driver.sequence(ids), 50)
    torch.testing.assert_close(found, reference_logits(model, ids), atol=1e-4, rtol=0)
    driver = LogitDriver(tmp_path / "out", dtype="float32")
    found = driver.logits(driver.sequence(ids), 50)
    assert (found - reference_logits(model, ids)).abs().mean() < 0.06 * found.std()


def test_int8_by_channel_with_an_odd_width(base: Path, tmp_path: Path) -> None:
    """`int-quantized`, as W8A8 checkpoints are stored: a scale an output, activations dynamic."""
    codes = torch.randint(-127, 128, (96, 64), dtype=torch.int8)
    scale = torch.rand(96, 1) * 0.01 + 1e-3
    target = changed(base, tmp_path, {NAME: codes, NAME + "_scale": scale}, format="int-quantized")
    source = open_checkpoint(target).source
    assert torch.equal(source.read(NAME, torch.float32), codes.float() * scale)
    source.close()
    load_model(EngineConfig(model=str(target)))


def changed(base: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], **declared: Any) -> Path:
    """The base with other tensors in place of NAME, and what its configuration says of them."""
    target = tmp_path / "changed"
    target.mkdir()
    held = load_file(base / "model.safetensors")
    del held[NAME]
    save_file(held | tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", **declared,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return target


def of_int8(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    parts = {
        "_packed": torch.zeros(96, 16, dtype=torch.int32),
        "_shape": torch.tensor([96, 64]),
        "_scale": torch.full((96, 2), 0.01),
    } | changes
    return {NAME + suffix: tensor for suffix, tensor in parts.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_scale": torch.zeros(96, 2)}, "values that are not above 0"),
        ({"_scale": torch.full((96, 2), float("nan"))}, "values that are not above 0"),
        ({"_scale": torch.full((96, 2), -1.0)}, "values that are not above 0"),
        ({"_scale": torch.ones(95, 2)}, "a scale for each of equal groups"),
        ({"_scale": torch.ones(96, 3)}, "a scale for each of equal groups"),
        ({"_scale": torch.ones(96, 8)}, "groups of 8: 16 or a multiple of 32"),
        ({"_scale": None}, "_scale is missing"),
        ({"_packed": torch.zeros(96, 15, dtype=torch.int32)}, "codes of 4 or 8 bits"),
        ({"_packed": torch.zeros(95, 16, dtype=torch.int32)}, "codes of 4 or 8 bits"),
        ({"_shape": torch.tensor([96, 65])}, "the configuration asks"),
        ({"_shape": torch.tensor([96])}, "two sizes are needed"),
        ({"_shape": None}, "_shape is missing"),
        ({"_zero_point": torch.zeros(3, 2, dtype=torch.int32)}, "rows are needed"),
        ({"_zero_point": torch.zeros(24, 3, dtype=torch.int32)}, "is needed"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    target = changed(base, tmp_path, of_int8(**changes))
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(EngineConfig(model=str(target)))
    assert "up_proj" in caught.value.message


SORTED = {"group_0": {"weights": {"num_bits": 8, "actorder": "group"}}}
ALTERNATING = torch.arange(64, dtype=torch.int32) % 2


def random_int8(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(9)
    codes = torch.randint(-128, 128, (96, 64), generator=random)
    scale = (torch.rand(96, 2, generator=random) * 0.01 + 1e-3).half().float()
    return of_int8(_packed=packed(codes, 8), _scale=scale, **changes)


def test_inputs_that_were_sorted_into_groups(base: Path, tmp_path: Path) -> None:
    """Act-order by group: each value has the scale of the group that its input was sorted into."""
    tensors = random_int8(_g_idx=ALTERNATING)
    source = open_checkpoint(changed(base, tmp_path, tensors, config_groups=SORTED)).source
    codes = words_to_codes(tensors[NAME + "_packed"], 8, 64)
    expected = torch.zeros(96, 64)
    for row in range(96):
        for column in range(64):
            scale = tensors[NAME + "_scale"][row, column % 2]
            expected[row, column] = codes[row, column] * scale
    torch.testing.assert_close(source.read(NAME, torch.float32), expected, rtol=1e-6, atol=0)
    found = source.codes(NAME)
    assert found is not None and found.order is not None
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    torch.testing.assert_close(
        QuantizedLinear([pack(found)])(x),
        rounded(x[:, order]) @ expected[:, order].t(),
        rtol=1e-4,
        atol=1e-4,
    )
    source.close()


@pytest.mark.parametrize("declared", [True, False])
def test_an_order_that_was_not_changed(base: Path, tmp_path: Path, declared: bool) -> None:
    """-1 for all inputs; and what is there without act-order is not looked at."""
    index = torch.full((64,), -1, dtype=torch.int32) if declared else ALTERNATING
    groups = SORTED if declared else {"group_0": {"weights": {"num_bits": 8}}}
    target = changed(base, tmp_path, random_int8(_g_idx=index), config_groups=groups)
    source = open_checkpoint(target).source
    found = source.codes(NAME)
    assert found is not None and found.order is None
    source.close()


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (None, "up_proj.weight_g_idx is missing"),
        (ALTERNATING[:-1], "each of 64 inputs is needed"),
        (ALTERNATING * 0, "does not have 32 inputs in each of 2 groups"),
    ],
)
def test_orders_that_are_not_one_are_refused(
    base: Path, tmp_path: Path, index: torch.Tensor | None, said: str
) -> None:
    tensors = random_int8() | ({} if index is None else {NAME + "_g_idx": index.clone()})
    target = changed(base, tmp_path, tensors, config_groups=SORTED)
    with pytest.raises(CheckpointError, match=said):
        load_model(EngineConfig(model=str(target)))


def test_tensors_that_fit_together_are_read(base: Path, tmp_path: Path) -> None:
    model = load_model(EngineConfig(model=str(changed(base, tmp_path, of_int8()))))
    assert model.bytes > 0


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ({"weights": {"num_bits": 8, "type": "float"}}, "weights of type 'float'"),
        ({"weights": {"num_bits": 3}}, "3 bits"),
        ({"weights": {"num_bits": 8}, "input_activations": {"num_bits": 4, "dynamic": True}},
         "activations of 4 bits"),
    ],
)  # fmt: skip
def test_schemes_beyond_what_is_computed_are_refused_by_name(
    base: Path, scheme: dict[str, Any], said: str
) -> None:
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": scheme},
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=said):
        model_spec(config)


def test_the_command_writes_beside_and_refuses_to_overwrite(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path / "data"))
    target = tmp_path / "small"
    command = ["model", "quantize", str(base), "--to", "int4", "--output", str(target), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(target)
    load_model(EngineConfig(model=str(target)))
    assert main(command) != 0
    assert "is not empty" in capsys.readouterr().err
    assert main(["model", "quantize", str(target), "--to", "int8", "--output", str(base)]) != 0
    assert "name another directory" in capsys.readouterr().err


def test_widths_without_whole_groups_and_other_sources_are_refused(tmp_path: Path) -> None:
    odd = save_checkpoint(tmp_path / "odd", intermediate_size=100)
    with pytest.raises(CheckpointError, match=r"down_proj.* has 100 inputs"):
        write_quantized(odd, tmp_path / "a", "int8")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="not a directory"):
        write_quantized(file, tmp_path / "b", "int8")
    with pytest.raises(ConfigError, match="not a known format"):
        write_quantized(odd, tmp_path / "c", "int3")
