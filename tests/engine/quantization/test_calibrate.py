"""Rounding by a text: the inputs that are measured, what is gained, and texts that are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.backends.layers.quantise import quantize
from engine.errors import ConfigError
from engine.models.calibrate import WINDOW, input_weights
from engine.models.quantise_files import write_quantized
from gateway.cli.main import main
from tests.engine.checkpoints import VOCAB, reference, reference_logits, save_checkpoint
from tests.engine.driver import LogitDriver
from tests.engine.models.test_family_parity import CASES

FAMILIES = {
    "llama": ("Llama", {"intermediate_size": 96}),
    "phi3": ("Phi3", {"intermediate_size": 96}),
    "gemma2": ("Gemma2", {"intermediate_size": 96, "sliding_window": 24}),
    "qwen2-moe": ("Qwen2Moe", {**CASES["qwen2-moe"][1], "moe_intermediate_size": 64,
                               "shared_expert_intermediate_size": 32, "intermediate_size": 96}),
}  # fmt: skip


def checkpoint_of(family: str, directory: Path) -> Path:
    """With a tokenizer whose tokens are the words w3 to w210, which lean to the first ones."""
    kind, changes = FAMILIES[family]
    checkpoint = save_checkpoint(directory, kind, **changes)
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    return checkpoint


def ids_of(count: int, seed: int) -> list[int]:
    draw = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return (3 + draw**3 * (VOCAB - 3)).long().tolist()


def write_text(path: Path, ids: list[int]) -> Path:
    path.write_text(" ".join(f"w{n}" for n in ids))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Measured by hooks on its linear layers."""
    checkpoint = checkpoint_of(family, tmp_path / "base")
    ids = ids_of(5 * WINDOW + 9, 1)
    found = input_weights(checkpoint, write_text(tmp_path / "text", ids))
    model = reference(checkpoint)
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str):
        def note(_module: object, given: tuple[torch.Tensor]) -> None:
            sums[name] = sums.get(name, 0) + given[0].flatten(0, -2).square().sum(0)

        return note

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name and name[-4:] != "gate":
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.no_grad():
        for n in range(5):
            model(torch.tensor([ids[n * WINDOW : (n + 1) * WINDOW]]))
    plain = {name: each for name, each in found.items() if name.endswith(".weight")}
    assert len(plain) == {"llama": 21, "gemma2": 21, "phi3": 27, "qwen2-moe": 15}[family]
    compared = 0
    for name, weights in plain.items():
        if name in sums:  # Phi-3's parts are inside of one
            torch.testing.assert_close(weights, sums[name] / (5 * WINDOW), rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared == {"llama": 21, "gemma2": 21, "phi3": 12, "qwen2-moe": 15}[family]
    if family == "qwen2-moe":
        theirs = sums["model.layers.0.mlp.shared_expert.gate_proj.weight"] / (5 * WINDOW)
        torch.testing.assert_close(found["model.layers.0"], theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_makes_the_error_on_such_text_smaller(family: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(family, tmp_path / "base")
    text = write_text(tmp_path / "text", ids_of(12 * WINDOW, 1))
    write_quantized(checkpoint, tmp_path / "plain", "int4")
    write_quantized(checkpoint, tmp_path / "by-text", "int4", text)
    ids = ids_of(200, 2)  # other words of the same kind
    expected = reference_logits(reference(checkpoint), ids)
    errors = {}
    for kind in ("plain", "by-text"):
        driver = LogitDriver(tmp_path / kind, dtype="float32")
        errors[kind] = (driver.logits(driver.sequence(ids), 200) - expected).square().mean()
    assert errors["by-text"] < 0.97 * errors["plain"], errors


def test_errors_are_weighed_by_their_inputs() -> None:
    """Against the least error among all ranges, tried one by one."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(40, 64, generator=random)
    inputs = torch.rand(64, generator=random) ** 8
    error = {
        kind: ((quantize(weight, "int4", given).dense() - weight).square() * inputs).sum()
        for kind, given in (("alike", None), ("weighed", inputs))
    }
    assert error["weighed"] < 0.8 * error["alike"]
    zeros = quantize(weight, "int4", torch.zeros(64))
    assert torch.isfinite(zeros.dense()).all(), "a text that never used these inputs"


def test_a_text_that_says_too_little_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path / "base")
    target, text = tmp_path / "out", write_text(tmp_path / "text", ids_of(900, 1))
    with pytest.raises(ConfigError, match="has 900 tokens: give at least 1024"):
        write_quantized(checkpoint, target, "int4", text)
    with pytest.raises(ConfigError, match=r"absent\.txt cannot be read"):
        write_quantized(checkpoint, target, "int4", tmp_path / "absent.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="bytes cannot be read"):
        write_quantized(checkpoint, target, "int4", tmp_path / "bytes")
    with pytest.raises(ConfigError, match="of no use for int8"):
        write_quantized(checkpoint, target, "int8", text)
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        write_quantized(bare, target, "int4", text)
    assert not target.exists()


def test_the_command_takes_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path / "data"))
    checkpoint = checkpoint_of("llama", tmp_path / "base")
    text = write_text(tmp_path / "text", ids_of(5 * WINDOW, 1))
    command = ["model", "quantize", str(checkpoint), "--to", "int4", "--json", "--output"]
    assert main([*command, str(tmp_path / "plain")]) == 0
    assert main([*command, str(tmp_path / "by-text"), "--calibrate", str(text)]) == 0
    assert "by-text" in json.loads(capsys.readouterr().out.splitlines()[-1])["path"]
    plain, by_text = (
        load_file(tmp_path / kind / "model.safetensors") for kind in ("plain", "by-text")
    )
    name = "model.layers.0.mlp.down_proj.weight_packed"
    assert not torch.equal(plain[name], by_text[name])
