"""A checkpoint with an adapter merged into it answers in `transformers` as PEFT does with the two."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.adapters.merge import write_merged
from engine.errors import AdapterError, CheckpointError, ConfigError
from gateway.cli.main import main
from tests.engine.adapters.test_adapter_kinds import KINDS, PROMPT, stirred
from tests.engine.adapters.test_inner_adapters import ATTENTION, EXPERTS, adapter_of, with_change
from tests.engine.checkpoints import (
    adapted_reference,
    reference,
    reference_greedy,
    reference_logits,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import Driver
from tests.engine.models.test_experts import save_checkpoint as save_case

PROTECTS = ("engine/adapters",)


def same(base: Path, adapter: Path, folder: Path, expected: Any) -> None:
    """In `transformers` and, greedy, in the engine without the adapter."""
    write_merged(base, adapter, folder)
    found = reference_logits(reference(folder), PROMPT)
    torch.testing.assert_close(found, reference_logits(expected, PROMPT), atol=5e-4, rtol=5e-4)
    driver = Driver(folder, dtype="float32")
    sequence = driver.sequence(PROMPT)
    driver.run([sequence], count=5)
    assert sequence.output == reference_greedy(expected, PROMPT, 5)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.proof)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, tied: bool, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", tie_word_embeddings=tied)
    adapter = stirred(save_adapter(base, tmp_path / "adapter", 4, 1, **dict(KINDS[kind])), 1)
    same(base, adapter, tmp_path / "out", adapted_reference(base, adapter))
    outer = any(each in kind for each in ("everywhere", "table", "head", "whole"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert written == (tied and not outer)


@pytest.mark.parametrize(
    ("family", "targets"), [("Phi3", ["qkv_proj", "gate_up_proj"]), ("Bloom", ["query_key_value"])]
)
def test_matrices_that_hold_several(family: str, targets: list[str], tmp_path: Path) -> None:
    changes: dict[str, Any] = (
        {} if family == "Phi3" else {"n_head": 4, "n_layer": 3, "hidden_size": 64}
    )
    base = save_checkpoint(tmp_path / "base", family, **changes)
    adapter = stirred(save_adapter(base, tmp_path / "adapter", 4, 1, targets, use_dora=True), 1)
    same(base, adapter, tmp_path / "out", adapted_reference(base, adapter))


def test_latent_attention_and_experts(tmp_path: Path) -> None:
    base = save_case(tmp_path / "base", "deepseek-v3")
    adapter = save_adapter(base, tmp_path / "attention", 3, 1, ATTENTION)
    same(base, adapter, tmp_path / "one", adapted_reference(base, adapter))
    module, names, _ = EXPERTS["deepseek-v3"]
    down = load_file(base / "model.safetensors")[
        f"model.layers.2.{module}.experts.0.{names[2]}.weight"
    ]
    adapter, added = adapter_of(
        tmp_path / "experts",
        {f"model.layers.2.{module}.experts.0.{names[2]}": tuple(down.shape)},
        1,
    )
    same(base, adapter, tmp_path / "two", with_change(base, added))


def test_types_and_files_stay_as_they_are(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    model = reference(base).to(torch.bfloat16)
    model.save_pretrained(base)
    (base / "tokenizer_config.json").write_text("{}")
    adapter = save_adapter(base, tmp_path / "adapter", 4, 1, ["q_proj"])
    written = write_merged(base, adapter, tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "out"))
    assert {each.dtype for each in after.values()} == {torch.bfloat16}
    assert written == sum(each.nbytes for each in after.values())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)}
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", 4, 1, ["q_proj"])
    with pytest.raises(ConfigError, match="exists and is not empty"):
        write_merged(base, adapter, base)
    with pytest.raises(CheckpointError, match="not a directory in Hugging Face layout"):
        write_merged(tmp_path / "none.gguf", adapter, tmp_path / "out")
    other = save_checkpoint(tmp_path / "other", hidden_size=96, num_attention_heads=6)
    with pytest.raises(AdapterError, match="was it trained on another base"):
        write_merged(other, adapter, tmp_path / "out")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"a": 1}}))
    with pytest.raises(CheckpointError, match="merge into the checkpoint in floats"):
        write_merged(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_it_in_several_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_checkpoint(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", 4, 1)
    monkeypatch.setattr("engine.models.write_checkpoint._SHARD_BYTES", 100_000)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path / "data"))
    out = tmp_path / "out"
    command = ["adapter", "merge", str(base), str(adapter), "--output", str(out), "--json"]
    assert main(command) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["path"] == str(out) and len(list(out.glob("*.safetensors"))) > 2
    expected = reference_logits(adapted_reference(base, adapter), PROMPT)
    found = reference_logits(reference(out), PROMPT)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)
    assert main(command) != 0
    assert "exists and is not empty" in capsys.readouterr().err
