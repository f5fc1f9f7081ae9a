"""A checkpoint that cannot be served is refused with a message that names the file or field."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.checkpoint import model_path
from engine.models.formats.safetensors_file import SafetensorsFile
from engine.models.load import choose_dtype, load_model
from engine.runners.cpu.runner import load_runner
from tests.engine.checkpoints import reference, reference_logits, save_checkpoint
from tests.engine.driver import LogitDriver

WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model")


def refused(checkpoint: Path, **settings: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_runner(EngineConfig(model=str(checkpoint), num_blocks=4, threads=1, **settings))
    return caught.value.message


def change(checkpoint: Path, **fields: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rewrite(checkpoint: Path, work: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    work(tensors)
    save_file(tensors, checkpoint / WEIGHTS, metadata={"format": "pt"})


Q = "model.layers.1.self_attn.q_proj.weight"


def test_truncated_weights(checkpoint: Path) -> None:
    whole = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    assert WEIGHTS in refused(checkpoint)


def test_another_file_under_the_name(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).write_bytes(b"PK\x03\x04 not tensors at all")
    assert WEIGHTS in refused(checkpoint)


def test_a_wrong_shape(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: t.update({Q: torch.zeros(64, 60)}))
    message = refused(checkpoint)
    assert Q in message and "[64, 60]" in message and "[64, 64]" in message


def test_a_missing_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: t.pop(Q))
    assert Q in refused(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(checkpoint: Path, value: float) -> None:
    rewrite(checkpoint, lambda t: t[Q].__setitem__((3, 5), value))
    assert Q in refused(checkpoint)


def test_weights_too_large_for_the_asked_type(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: t[Q].__setitem__((3, 5), 1e6))
    message = refused(checkpoint, dtype="float16")
    assert Q in message and "float16" in message


def test_integer_weights(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: t.update({Q: torch.zeros(64, 64, dtype=torch.int32)}))
    assert Q in refused(checkpoint)


def test_an_index_that_points_wrongly(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, shard="60KB")
    index = checkpoint / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    files = sorted(set(told["weight_map"].values()))
    told["weight_map"][Q] = next(f for f in files if f != told["weight_map"][Q])
    index.write_text(json.dumps(told))
    assert Q in refused(checkpoint)
    told["weight_map"][Q] = "absent.safetensors"
    index.write_text(json.dumps(told))
    assert "absent.safetensors" in refused(checkpoint)
    index.write_text("{")
    assert index.name in refused(checkpoint)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"vocab_size": True}, "vocab_size"),
    ],
)
def test_a_configuration_that_cannot_be(
    checkpoint: Path, fields: dict[str, Any], named: str
) -> None:
    change(checkpoint, **fields)
    assert named in refused(checkpoint)


def test_directories_and_names(tmp_path: Path, checkpoint: Path) -> None:
    assert "config.json" in refused(tmp_path)
    (checkpoint / "config.json").write_text("[1]")
    assert "config.json" in refused(checkpoint)
    (checkpoint / "config.json").write_text("{")
    assert "config.json" in refused(checkpoint)
    with pytest.raises(CheckpointError, match="a directory"):
        model_path(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="a directory"):
        model_path("just-a-word")


def test_a_context_beyond_the_model(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="256"):
        load_runner(EngineConfig(model=str(checkpoint), max_context=257))


@pytest.mark.parametrize("native", [True, False])
def test_auto_keeps_full_precision_and_takes_what_the_processor_multiplies(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr("engine.models.load.multiplies_bfloat16", lambda: native)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    half = torch.bfloat16 if native else torch.float32
    assert choose_dtype("auto", torch.float16, cpu) is half
    assert choose_dtype("auto", torch.float32, cpu) is torch.float32
    assert choose_dtype("auto", torch.bfloat16, cpu) is half
    assert choose_dtype("auto", torch.float16, gpu) is torch.float16
    assert choose_dtype("float16", torch.float32, cpu) is torch.float16


@pytest.mark.parametrize(
    ("family", "fields", "told"),
    [
        (
            "Granite",
            {"residual_multiplier": 0.0},
            "residual_multiplier is 0.0: it must be a finite",
        ),
        (
            "Granite",
            {"logits_scaling": -8},
            "logits_scaling is -8: it must be a finite number above",
        ),
        ("Phi3", {"intermediate_size": 100}, "gate_up_proj.weight has shape [224, 64]"),
        (
            "Phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope longrope needs 8 numbers above 0 in short_factor",
        ),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 3 layers"),
        (
            "SmolLM3",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "no_rope_layer_interval",
        ),
    ],
)
def test_a_wrong_value_of_a_family(
    tmp_path: Path, family: str, fields: dict[str, Any], told: str
) -> None:
    checkpoint = save_checkpoint(tmp_path, family)
    change(checkpoint, **fields)
    assert told in refused(checkpoint)


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def test_a_missing_head_is_not_replaced_by_the_token_table(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: t.pop(HEAD))
    message = refused(checkpoint)
    assert HEAD in message and "tie_word_embeddings" in message


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere", "Qwen2"])
def test_a_stored_head_that_differs_is_used_as_transformers_does(
    tmp_path: Path, family: str
) -> None:
    directory = save_checkpoint(tmp_path / "model", family, tie_word_embeddings=True)
    rewrite(directory, lambda t: t.update({HEAD: t[TABLE].flip(0).clone()}))
    prompt = [5, 9, 12, 40]
    expected = reference_logits(reference(directory), prompt)[-1]
    driver = LogitDriver(directory, dtype="float32")
    found = driver.logits(driver.sequence(prompt), len(prompt))[-1]
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_stored_head_that_is_the_table_is_read_once(tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    before = load_model(EngineConfig(model=str(directory), threads=1)).bytes
    rewrite(directory, lambda t: t.update({HEAD: t[TABLE].clone()}))
    assert load_model(EngineConfig(model=str(directory), threads=1)).bytes == before


def test_files_cut_off_in_place_under_a_served_model(checkpoint: Path) -> None:
    # A part of a mapped file that is no longer there ends the process that reads it.
    program = (
        "import os, sys; from pathlib import Path\n"
        "from tests.engine.driver import LogitDriver\n"
        "driver = LogitDriver(Path(sys.argv[1]), dtype='float32')\n"
        "for file in Path(sys.argv[1]).iterdir(): os.truncate(file, 10)\n"
        "print(driver.logits(driver.sequence([5, 9, 12]), 3)[-1].tolist())\n"
    )
    expected = reference_logits(reference(checkpoint), [5, 9, 12])[-1]
    done = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint)], capture_output=True, text=True, check=True
    )
    assert torch.allclose(torch.tensor(json.loads(done.stdout)), expected, atol=1e-4)
    message = refused(checkpoint)  # a later start says what happened
    assert "config.json" in message


def test_a_file_cut_off_while_it_is_read(checkpoint: Path) -> None:
    file = SafetensorsFile(checkpoint / WEIGHTS)
    expected = load_file(checkpoint / WEIGHTS)
    assert set(file.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(file.read(name), tensor)
        assert torch.equal(file.part(name, 1), tensor[1])
    os.truncate(checkpoint / WEIGHTS, (checkpoint / WEIGHTS).stat().st_size // 2)
    with pytest.raises(CheckpointError, match="by rename"):
        for name in file.names():
            file.read(name)
    file.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS, f"{WEIGHTS}.index.json"])
def test_a_pipe_or_a_device_in_place_of_a_file(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    assert name in refused(checkpoint)
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to("/dev/zero")
    assert name in refused(checkpoint)
