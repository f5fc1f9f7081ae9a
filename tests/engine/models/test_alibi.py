"""ALiBi: slopes by hand, batches, configurations as published, and what is refused.

`test_family_parity.py` compares logits, greedy tokens and adapters with `transformers`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import AdapterError, CheckpointError, ConfigError
from engine.models.alibi_slopes import halving_slopes
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
from tests.engine.driver import Driver, LogitDriver, alone_and_together
from tests.engine.models.test_family_parity import CASES
from tests.engine.models.test_gemma3 import rewrite

BLOOM: dict[str, Any] = {  # the fields of bigscience/bloom-560m
    "architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 24, "n_head": 16,
    "hidden_size": 1024, "vocab_size": 250880, "layer_norm_epsilon": 1e-05, "eos_token_id": 2,
    "apply_residual_connection_post_layernorm": False,
}  # fmt: skip
MPT: dict[str, Any] = {  # of mosaicml/mpt-7b-storywriter
    "architectures": ["MptForCausalLM"], "model_type": "mpt", "n_layers": 32, "n_heads": 4,
    "d_model": 4096, "expansion_ratio": 4, "max_seq_len": 65536, "vocab_size": 50432,
    "no_bias": True, "logit_scale": None,
    "attn_config": {
        "alibi": True, "alibi_bias_max": 16, "attn_impl": "torch", "clip_qkv": 6, "qk_ln": False,
        "attn_type": "multihead_attention", "prefix_lm": False, "softmax_scale": None,
    },
}  # fmt: skip
FALCON: dict[str, Any] = {  # of tiiuae/falcon-40b
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "num_hidden_layers": 60,
    "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192, "vocab_size": 65024,
    "new_decoder_architecture": True, "parallel_attn": True, "alibi": False, "bias": False,
    "multi_query": True,
}  # fmt: skip


def ids_of(count: int, seed: int = 2) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=random).tolist()


def test_slopes_are_those_of_the_paper() -> None:
    """For 8 heads 1/2 to 1/256; for 12 also every other one of 16."""
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert halving_slopes(8) == tuple(eight)
    assert halving_slopes(12) == pytest.approx([*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_configurations_as_published() -> None:
    bloom, mpt, falcon = (model_spec(each) for each in (BLOOM, MPT, FALCON))
    assert (bloom.layers, bloom.heads, bloom.intermediate, bloom.context) == (24, 16, 4096, 2048)
    assert bloom.tied and bloom.embedding_norm and bloom.eos == (2,)
    assert (mpt.layers, mpt.context, mpt.qkv_cap) == (32, 65536, 6)
    assert mpt.alibi is not None and mpt.alibi.slopes == (2**-4, 2**-8, 2**-12, 2**-16)
    assert (falcon.kv_heads, falcon.intermediate, falcon.alibi) == (8, 32768, None)
    assert falcon.parallel and falcon.parallel_norm and falcon.rope_of(3) == 0


@pytest.mark.parametrize(
    ("raw", "changes", "told"),
    [
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, "residual_connection"),
        (BLOOM, {"n_head": 0}, "n_head is 0"),
        (MPT, {"attn_config": {"alibi": False}}, "alibi false is not supported"),
        (MPT, {"attn_config": {"qk_ln": True}}, "qk_ln is not supported"),
        (MPT, {"logit_scale": "inv_sqrt_d_model"}, "logit_scale is 'inv_sqrt_d_model'"),
        (MPT, {"attn_config": {"clip_qkv": -1}}, "clip_qkv is -1"),
        (FALCON, {"parallel_attn": False}, "without parallel_attn is not supported"),
        (FALCON, {"activation": "relu"}, "activation is 'relu': use gelu"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(
    raw: dict[str, Any], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        model_spec(raw | changes)


@pytest.mark.parametrize("case", ["bloom", "mpt", "falcon-alibi", "falcon-new"])
def test_answers_do_not_depend_on_the_batch(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    prompts = [ids_of(9 + 7 * n, n) for n in range(5)]
    alone, together = alone_and_together(checkpoint, prompts)
    assert together == alone


def test_a_checkpoint_without_the_decoders_name(tmp_path: Path) -> None:
    """As BLOOM's are published; the older configuration has other names too."""
    checkpoint = save_checkpoint(tmp_path, "Bloom", **CASES["bloom"][1])
    ids = ids_of(40)
    expected = reference_logits(reference(checkpoint), ids)
    path = checkpoint / "model.safetensors"
    bare = {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
    save_file(bare, path, {"format": "pt"})
    raw = json.loads((checkpoint / "config.json").read_text())
    rewrite(checkpoint, hidden_size=None, n_embed=raw["hidden_size"])
    driver = LogitDriver(checkpoint, dtype="float32")
    found = driver.logits(driver.sequence(ids), 40)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["bloom", "falcon-new"])
def test_rounded_weights_and_keys_in_8_bits(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    ids = ids_of(40)
    expected = reference_logits(reference(checkpoint), ids)
    for setting in ({"quantization": "int8"}, {"kv_dtype": "int8"}):
        driver = LogitDriver(checkpoint, dtype="float32", **setting)
        found = driver.logits(driver.sequence(ids), 40)
        assert 0 < (found - expected).abs().mean() < 0.1 * expected.std(), setting


def test_an_adapters_own_rank_for_a_fused_matrix(tmp_path: Path) -> None:
    """Patterns of ranks name modules as the family does."""
    checkpoint = save_checkpoint(tmp_path / "base", "Bloom", **CASES["bloom"][1])
    adapter = save_adapter(
        checkpoint, tmp_path / "adapter", 3, 1, ["query_key_value", "dense"],
        rank_pattern={"h.1.self_attention.query_key_value": 5},
    )  # fmt: skip
    driver = Driver(checkpoint, dtype="float32", max_adapter_slots=1, max_lora_rank=8)
    sequence = driver.sequence(ids_of(19), adapter=driver.adapter(adapter, 0))
    driver.run([sequence], count=8)
    model = adapted_reference(checkpoint, adapter)
    assert sequence.output == reference_greedy(model, ids_of(19), 8)


def test_an_adapter_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", "Bloom", **CASES["bloom"][1])
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1, ["query_key_value"])
    rewrite_config = json.loads((adapter / "adapter_config.json").read_text())
    rewrite_config["target_modules"] = ["query_key_value", "c_attn"]
    (adapter / "adapter_config.json").write_text(json.dumps(rewrite_config))
    with pytest.raises(AdapterError, match="target_modules has 'c_attn': supported are dense, "):
        Driver(checkpoint).runner.register_adapter(str(adapter))


@pytest.mark.parametrize("case", ["bloom", "gpt-oss"])
def test_a_family_that_is_not_written_quantised_says_so(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path / "base", family, **changes)
    with pytest.raises(ConfigError, match="serve it with --quantization int8"):
        write_quantized(checkpoint, tmp_path / "out", "int8")
