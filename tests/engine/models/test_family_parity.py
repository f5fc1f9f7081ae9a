"""Each family and each rotary scaling gives the logits of `transformers` within 1e-4 in float32.

Chunks, cached prefixes and neighbours in the batch must not change them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_greedy,
    reference_logits,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import BLOCK, Driver, LogitDriver

PROTECTS = ("engine/models", "engine/adapters")

_LONG: dict[str, Any] = {"max_position_embeddings": 128}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | values}


def _longrope(original: int) -> dict[str, Any]:
    """For heads of 20 and a context of 128."""
    return {
        "hidden_size": 60,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + n / 10 for n in range(10)],
            "long_factor": [1.5 + n for n in range(10)],
        },
    }


_MLA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 26,
    "q_lora_rank": 22,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 14,
    "v_head_dim": 18,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "first_k_dense_replace": 1,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-biased": ("Llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama-mqa-wide-heads": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-linear": ("Llama", _LONG | _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", _rope("dynamic", factor=4.0)),
    "llama-yarn": (
        "Llama",
        _LONG | _rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-llama3": (
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"sliding_window": 24, "head_dim": 32, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "hidden_size": 66,
            "head_dim": 14,
            "sliding_window": 18,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 3.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "num_hidden_layers": 7,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "hidden_size": 66,
            "head_dim": 14,
            "sliding_window": 18,
            "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
            "num_kv_shared_layers": 3,
            "activation_sparsity_pattern": [0.9, 0.4, 0.0, 0.7, 0.0, 0.95, 0.0],
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 10,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 190,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3n-own-keys": (
        "Gemma3n",
        {
            "num_hidden_layers": 5,
            "head_dim": 20,
            "sliding_window": 22,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 24,
            "altup_correct_scale": False,
            "tie_word_embeddings": False,
            "rms_norm_eps": 0.01,
        },
    ),
    "command-r": (
        "Cohere",
        {"num_attention_heads": 6, "hidden_size": 66, "head_dim": 14, "layer_norm_eps": 0.01},
    ),
    "command-r-norms": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.7, "head_dim": 20}),
    "command-r7b": (
        "Cohere2",
        {"num_hidden_layers": 5, "sliding_window_pattern": 2, "sliding_window": 22},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 6.0,
            "rms_norm_eps": 0.01,
            "mlp_bias": True,
        },
    ),
    "olmo2": ("Olmo2", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12}),
    "smollm3": (
        "SmolLM3",
        {
            "num_hidden_layers": 5,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 14,
        },
    ),
    "smollm3-windows": (
        "SmolLM3",
        _LONG
        | _rope("yarn", factor=4.0, original_max_position_embeddings=32)
        | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 20},
    ),
    "phi3": ("Phi3", {"sliding_window": 24, "num_attention_heads": 6, "hidden_size": 60}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 24, "head_dim": 20},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "shared_expert_intermediate_size": 52,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 9,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 28,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 30,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 68,  # the reference multiplies rows of 16 bytes
            "head_dim": 14,
            "intermediate_size": 44,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "sliding_window": 18,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.7,
        },
    ),
    "gpt-oss-yarn": (
        "GptOss",
        _LONG
        | _rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False)
        | {"num_hidden_layers": 2, "head_dim": 20, "num_local_experts": 4, "sliding_window": 30},
    ),
    "bloom": ("Bloom", {"num_attention_heads": 6, "hidden_size": 84}),
    "mpt": ("Mpt", {"num_attention_heads": 6, "hidden_size": 84, "max_seq_len": 128}),
    "mpt-clipped": (
        "Mpt",
        {
            "layer_norm_epsilon": 0.01,
            "attn_config": {"clip_qkv": 0.4, "softmax_scale": 0.2},
        },
    ),
    "falcon": ("Falcon", {"num_attention_heads": 5, "hidden_size": 70}),
    "falcon-new": (
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "hidden_size": 84,
            "ffn_hidden_size": 100,
            "layer_norm_epsilon": 0.01,
        },
    ),
    "falcon-new-one-norm": (
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 2,
            "bias": True,
        },
    ),
    "falcon-alibi": (
        "Falcon",
        {
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "num_attention_heads": 6,
            "hidden_size": 84,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        _MLA
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
        },
    ),
    "deepseek-v2-greedy": ("DeepseekV2", _MLA | {"routed_scaling_factor": 1.7}),
    "deepseek-v3": (
        "DeepseekV3",
        _MLA
        | {
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 1,
            "attention_bias": True,
            "rms_norm_eps": 0.01,
        },
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        _MLA
        | _LONG
        | _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=1.0,
            mscale_all_dim=0.7,
        )
        | {"n_group": 1, "topk_group": 1},
    ),
    "phi4-mini": (
        "Phi3",
        _LONG
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 60}
        | _rope("default", partial_rotary_factor=0.6)
        | {"tie_word_embeddings": True},
    ),
    "phi4-mini-longrope": (
        "Phi3",
        _longrope(32)
        | {"num_attention_heads": 3, "num_key_value_heads": 1}
        | _rope(
            "longrope",
            partial_rotary_factor=0.5,
            short_factor=[1.0 + n / 10 for n in range(5)],
            long_factor=[1.5 + n for n in range(5)],
        ),
    ),
    "phi3-longrope": ("Phi3", {"num_attention_heads": 3, "num_key_value_heads": 1} | _longrope(32)),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    random = torch.Generator().manual_seed(len(case))
    ids = torch.randint(3, VOCAB, (75,), generator=random).tolist()
    expected = reference_logits(reference(checkpoint), ids)
    driver = LogitDriver(checkpoint, dtype="float32")
    sequence = driver.sequence(ids)
    beside = driver.sequence(torch.randint(3, VOCAB, (90,), generator=random).tolist())
    parts = [
        driver.logits(sequence, 21, (beside, 30)),
        driver.logits(sequence, 1, (beside, 1)),
        driver.logits(sequence, 52, (beside, 40)),
        driver.logits(sequence, 1, (beside, 1)),
    ]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama", "mistral", "gemma2", "gemma3", "gemma3n"])
def test_a_reused_prefix_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    ids = torch.randint(3, VOCAB, (70,), generator=torch.Generator().manual_seed(5)).tolist()
    driver = LogitDriver(checkpoint, dtype="float32")
    first = driver.sequence(ids)
    cold = driver.logits(first, 70)
    second = driver.sequence(ids)
    second.blocks, second.done = first.blocks[: 48 // BLOCK], 48
    warm = driver.logits(second, 22)
    torch.testing.assert_close(warm, cold[48:], atol=1e-4, rtol=0)


_FUSED_TARGETS = ["qkv_proj", "o_proj", "gate_up_proj"]
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "granite": None,
    "olmo2": None,
    "smollm3": None,
    "phi3": _FUSED_TARGETS,
    "gemma3": None,
    "gemma3n": None,
    "gemma3n-own-keys": None,
    "command-r-norms": None,
    "command-r7b": None,
    "mixtral": _ATTENTION,
    "qwen2-moe": r".*\.(q|k|v|o)_proj|.*\.1\.mlp\.(gate|up|down)_proj",
    "qwen3-moe": _ATTENTION,
    "gpt-oss": _ATTENTION,
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "mpt": ["Wqkv", "out_proj", "up_proj", "down_proj"],
    "falcon": ["query_key_value", "dense_4h_to_h"],
    "falcon-new": ["query_key_value", "dense", "dense_h_to_4h"],
    "falcon-alibi": ["query_key_value"],
}


# The others' adapters differ from these in the names of the matrices, or meet two ranks in the suite.
ADAPTED = {"granite", "phi3", "gemma3n", "command-r7b", "qwen2-moe", "mpt", "falcon-new"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if each in ADAPTED else pytest.mark.proof) for each in TARGETS],
)
def test_greedy_tokens_with_and_without_an_adapter(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path / "base", family, **changes)
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1, TARGETS[case])
    driver = Driver(checkpoint, dtype="float32", max_adapter_slots=1, max_lora_rank=3)
    handle = driver.adapter(adapter, 0)
    prompt = torch.randint(3, VOCAB, (19,), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [driver.sequence(prompt), driver.sequence(prompt, adapter=handle)]
    driver.run(sequences, chunk=11, count=8)
    models = reference(checkpoint), adapted_reference(checkpoint, adapter)
    expected = [reference_greedy(model, prompt, 8) for model in models]
    assert [sequence.output for sequence in sequences] == expected
    assert expected[0] != expected[1]


def test_dynamic_scaling_past_the_native_context_is_as_if_decoded(tmp_path: Path) -> None:
    """`transformers` rotates by the length reached; a position here by the length it ends."""
    changes = {"max_position_embeddings": 32} | _rope("dynamic", factor=4.0)
    checkpoint = save_checkpoint(tmp_path, "Llama", **changes)
    ids = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    model = reference(checkpoint)
    cache, expected = None, []
    with torch.no_grad():
        for token in ids:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            expected.append(out.logits[0, 0])
    driver = LogitDriver(checkpoint, dtype="float32")
    found = driver.logits(driver.sequence(ids), 60)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=0)
    assert driver.runner.info.context_length == 128


def test_longrope_within_the_original_context(tmp_path: Path) -> None:
    """With the short factors where no served sequence is longer, as in `transformers`."""
    changes = {"num_attention_heads": 3, "num_key_value_heads": 3} | _longrope(80)
    checkpoint = save_checkpoint(tmp_path, "Phi3", **changes)
    ids = torch.randint(3, VOCAB, (75,), generator=torch.Generator().manual_seed(5)).tolist()
    short = LogitDriver(checkpoint, dtype="float32", max_context=80)
    found = short.logits(short.sequence(ids), 75)
    torch.testing.assert_close(
        found, reference_logits(reference(checkpoint), ids), atol=1e-4, rtol=0
    )
    long = LogitDriver(checkpoint, dtype="float32")
    assert (long.logits(long.sequence(ids), 75) - found).abs().max() > 1e-2
    assert long.runner.info.base_digest != short.runner.info.base_digest
