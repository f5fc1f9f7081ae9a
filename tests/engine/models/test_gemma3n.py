"""Gemma 3n: what short configurations leave out, layers without keys of their own, and the text part of a
checkpoint with towers.

`test_family_parity.py` compares logits and greedy tokens with `transformers`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gemma3n import modeling_gemma3n

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.errors import AdapterError, CheckpointError, ConfigError
from engine.models.load import load_model
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
from tests.engine.driver import Driver, LogitDriver, alone_and_together, greedy
from tests.engine.models.test_family_parity import CASES
from tests.engine.models.test_gemma3 import rewrite

IDS = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(6)).tolist()
SHAPE = CASES["gemma3n"][1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("gemma3n"), "Gemma3n", **SHAPE)


def test_what_a_short_configuration_leaves_out() -> None:
    theirs = transformers.Gemma3nTextConfig()
    spec = model_spec(
        {
            "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
            "text_config": {"model_type": "gemma3n_text", "num_hidden_layers": 35},
            "eos_token_id": [1, 106],
        }
    )  # fmt: skip
    assert (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate) == (
        theirs.hidden_size, theirs.num_attention_heads, theirs.num_key_value_heads,
        theirs.head_dim, theirs.intermediate_size[0],
    )  # fmt: skip
    assert (spec.vocab, spec.context) == (theirs.vocab_size, theirs.max_position_embeddings)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in spec.windows]
    assert kinds == theirs.layer_types and set(spec.windows) == {None, theirs.sliding_window}
    assert list(spec.sparsity) == theirs.activation_sparsity_pattern
    assert spec.logit_cap == theirs.final_logit_softcapping and spec.eos == (1, 106)
    streams = spec.streams
    assert streams is not None
    assert (streams.count, streams.active, streams.rank, streams.inputs, streams.vocab) == (
        theirs.altup_num_inputs, theirs.altup_active_idx, theirs.laurel_rank,
        theirs.hidden_size_per_layer_input, theirs.vocab_size_per_layer_input,
    )  # fmt: skip
    modes = theirs.kv_sharing_modes
    sources = [n if modes[n] != "reuse" else spec.source_of(n) for n in range(35)]
    assert sources == [spec.source_of(n) for n in range(35)]
    assert spec.cached_layers == modes.index("reuse")
    stored = {kinds[n]: n for n, mode in enumerate(modes) if mode == "store"}
    assert all(sources[n] == stored[kinds[n]] for n, mode in enumerate(modes) if mode == "reuse")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_layers_that_share_keys_take_no_memory(checkpoint: Path, kv_dtype: str) -> None:
    driver = Driver(checkpoint, dtype="float32", kv_dtype=kv_dtype)
    each = 14 * 4 if kv_dtype == "auto" else 14 + 2
    assert driver.runner.pool.block_bytes == 4 * 16 * 2 * 3 * each, "4 of 7 layers"
    sequence = driver.sequence(IDS)
    driver.run([sequence], chunk=13, count=4)
    expected = reference_greedy(reference(checkpoint), IDS, 4)
    assert sequence.output == expected


def test_answers_do_not_depend_on_the_batch_or_the_chunks(checkpoint: Path) -> None:
    alone, together = alone_and_together(checkpoint, [IDS[:7], IDS[3:33], IDS[10:11], IDS])
    assert together == alone


def test_layers_beyond_the_last_keys_compute_sampled_rows_alone(checkpoint: Path) -> None:
    """A step of 20 tokens of which none is sampled, then one in which one of 30 is."""
    driver = Driver(checkpoint, dtype="float32")
    rows: list[tuple[int, int]] = []
    streams = driver.runner._model.decoder.streams
    assert streams is not None
    for number, layer in enumerate(streams._layers):
        beside = layer.beside_norm

        def seen(x: torch.Tensor, number: int = number, norm: Any = beside) -> torch.Tensor:
            rows.append((number, len(x)))
            return norm(x)

        object.__setattr__(layer, "beside_norm", seen)
    sequence = driver.sequence(IDS, greedy(1))
    driver.step((sequence, 20))
    assert rows == [(0, 20), (1, 20), (2, 20)]
    rows.clear()
    driver.step((sequence, 0))
    assert rows == [(n, 30 if n < 3 else 1) for n in range(7)]
    assert sequence.output == reference_greedy(reference(checkpoint), IDS, 1)
    assert driver.runner.launch(StepBatch([])) == []


def test_an_adapter_with_matrices_that_a_sharing_layer_does_not_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Earlier versions of `transformers` had keys and values in all layers, of which training left the
    later ones as they began."""
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1)
    expected = reference_greedy(adapted_reference(checkpoint, adapter), IDS, 6)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    random = torch.Generator().manual_seed(2)
    for layer in (4, 6):
        root = f"base_model.model.model.layers.{layer}.self_attn.k_proj.lora"
        tensors[f"{root}_A.weight"] = torch.randn(3, 66, generator=random)
        tensors[f"{root}_B.weight"] = torch.zeros(42, 3)
    save_file(tensors, path, metadata={"format": "pt"})
    driver = Driver(checkpoint, dtype="float32", max_adapter_slots=1, max_lora_rank=3)
    sequence = driver.sequence(IDS, adapter=driver.adapter(adapter, 0))
    driver.run([sequence], chunk=17, count=6)
    assert sequence.output == expected


def test_an_adapter_of_the_small_matrices_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1, ["linear_left", "q_proj"])
    driver = Driver(checkpoint, dtype="float32")
    with pytest.raises(AdapterError, match="target_modules has 'linear_left'"):
        driver.adapter(adapter, 0)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_in_codes(checkpoint: Path, quantization: str) -> None:
    plain = LogitDriver(checkpoint, dtype="float32")
    expected = plain.logits(plain.sequence(IDS), 50)
    driver = LogitDriver(checkpoint, dtype="float32", quantization=quantization)
    found = driver.logits(driver.sequence(IDS), 50)
    error = (found - expected).abs().mean() / expected.std()
    assert 0 < error < (0.15 if quantization == "int8" else 0.8)
    assert driver.runner._model.bytes < plain.runner._model.bytes / 2


def with_towers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint as `transformers` names it; its image tower is another library's, and empty here."""
    build = transformers.AutoModel.from_config
    monkeypatch.setattr(
        modeling_gemma3n.AutoModel,
        "from_config",
        lambda config, **given: (
            build(config, **given) if "text" in config.model_type else torch.nn.Identity()
        ),
    )
    audio = {"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2}
    text = {name: value for name, value in SHAPE.items() if "parameters" not in name}
    shape = {"vocab_size": VOCAB, "intermediate_size": 40, "max_position_embeddings": 256}
    config = transformers.Gemma3nConfig(text_config=shape | text, audio_config=audio)
    torch.manual_seed(3)
    model = transformers.Gemma3nForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.model.language_model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    save_file(
        {
            name: tensor.contiguous().clone()
            for name, tensor in model.state_dict().items()
            if name != "lm_head.weight"
        },
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    raw = config.to_dict() | {"architectures": ["Gemma3nForConditionalGeneration"]}
    (directory / "config.json").write_text(json.dumps(raw, default=str))
    torch.save(reference_logits(model, IDS), directory / "expected.pt")
    return directory


def test_the_text_part_of_a_checkpoint_with_towers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = with_towers(tmp_path, monkeypatch)
    driver = LogitDriver(checkpoint, dtype="float32")
    found = driver.logits(driver.sequence(IDS), 50)
    torch.testing.assert_close(found, torch.load(tmp_path / "expected.pt"), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"intermediate_size": [112] * 6 + [96]}, "layers of different sizes"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7: it must be from 0 to 6"),
        ({"num_kv_shared_layers": 6}, "no keys and values of one of their kinds"),
        ({"altup_active_idx": 3}, "altup_active_idx is 3: it must be from 0 to 2"),
        ({"activation_sparsity_pattern": [0.5] * 6 + [1.0]}, "each is a number from 0 to below 1"),
        ({"laurel_rank": 0}, "laurel_rank is 0"),
        ({"laurel_rank": 11}, "laurel.linear_left.weight has shape"),
    ],
)
def test_a_bad_configuration_is_refused(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    checkpoint = save_checkpoint(tmp_path, "Gemma3n", **SHAPE)
    rewrite(checkpoint, **fields)
    with pytest.raises(CheckpointError, match=named):
        load_model(EngineConfig(model=str(checkpoint)))


def test_what_is_not_computed_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="batch_invariant is not served with several residual"):
        load_model(EngineConfig(model=str(checkpoint), dtype="float32", batch_invariant=True))
