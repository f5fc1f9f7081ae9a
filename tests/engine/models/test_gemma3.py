"""Gemma 3: configurations of earlier versions, and the text part of a checkpoint with images.

`test_family_parity.py` compares logits and greedy tokens with `transformers`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.models.load import load_model
from engine.models.quantise_files import write_quantized
from engine.models.registry import model_spec
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_greedy,
    reference_logits,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import LogitDriver
from tests.engine.models.test_family_parity import CASES

IDS = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(6)).tolist()


def rewrite(checkpoint: Path, **fields: Any) -> None:
    """Fields that are None are removed."""
    path = checkpoint / "config.json"
    changed = json.loads(path.read_text()) | fields
    kept = {name: value for name, value in changed.items() if value is not None}
    path.write_text(json.dumps(kept))


def test_a_configuration_of_an_earlier_version(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, "Gemma3", **CASES["gemma3"][1])
    expected = reference_logits(reference(checkpoint), IDS)
    rewrite(
        checkpoint,
        rope_parameters=None,
        layer_types=None,
        _sliding_window_pattern=None,
        sliding_window_pattern=3,
        rope_theta=9000.0,
        rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 3.0},
        num_attention_heads=6,
    )
    driver = LogitDriver(checkpoint, dtype="float32")
    found = driver.logits(driver.sequence(IDS), 50)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert driver.runner.info.context_length == 256, "the factor is in the context already"


def test_what_a_short_configuration_leaves_out() -> None:
    """As that of the 4B model: sizes that equal the defaults of `transformers` are not there."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": text, "eos_token_id": [1, 106],
    }  # fmt: skip
    spec, theirs = model_spec(whole), transformers.Gemma3TextConfig(**text)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
    )  # fmt: skip
    assert (spec.vocab, spec.context) == (theirs.vocab_size, theirs.max_position_embeddings)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in spec.windows]
    assert kinds == theirs.layer_types and set(spec.windows) == {None, 1024}
    assert [rope.theta for rope in spec.ropes] == [
        theirs.rope_parameters[kind]["rope_theta"]
        for kind in ("full_attention", "sliding_attention")
    ]
    assert spec.eos == (1, 106) and spec.tied


def with_images(directory: Path) -> Path:
    """A checkpoint with a vision tower; its text model is small and random."""
    text = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20,
        "max_position_embeddings": 128, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention",
        ],
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(3)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=0
    )
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(directory)
    return directory


def test_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    checkpoint = with_images(tmp_path / "base")
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    driver = LogitDriver(checkpoint, dtype="float32")
    found = driver.logits(driver.sequence(IDS), 50)
    torch.testing.assert_close(found, reference_logits(model, IDS), atol=2e-4, rtol=0)
    targets = r".*language_model.*\.(q_proj|down_proj)"
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1, targets)
    handle = driver.adapter(adapter, 0)
    adapted, plain = driver.sequence(IDS[:20], adapter=handle), driver.sequence(IDS[:20])
    driver.run([adapted, plain], count=6)
    assert plain.output == reference_greedy(model, IDS[:20], 6)
    assert adapted.output == reference_greedy(adapted_reference(checkpoint, adapter), IDS[:20], 6)


def test_a_written_checkpoint_leaves_the_vision_tower_as_it_is(tmp_path: Path) -> None:
    checkpoint = with_images(tmp_path / "base")
    write_quantized(checkpoint, tmp_path / "out", "int8")
    driver = LogitDriver(tmp_path / "out", dtype="float32")
    found = driver.logits(driver.sequence(IDS), 50)
    plain = LogitDriver(checkpoint, dtype="float32")
    expected = plain.logits(plain.sequence(IDS), 50)
    assert 0 < (found - expected).abs().mean() < 0.1 * expected.std()
    assert driver.runner._model.bytes < plain.runner._model.bytes


def test_attention_in_both_directions_is_refused(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, "Gemma3")
    rewrite(checkpoint, use_bidirectional_attention=True)
    with pytest.raises(CheckpointError, match="use_bidirectional_attention is not supported"):
        load_model(EngineConfig(model=str(checkpoint)))
