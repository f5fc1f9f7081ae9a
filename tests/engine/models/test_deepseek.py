"""DeepSeek V2 and V3: the cache of latent vectors, batches, configurations as published, refusals.

`test_family_parity.py` compares logits, greedy tokens and adapters with `transformers`;
`tests/engine/adapters/test_inner_adapters.py` adapters of its attention and experts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.layers.routing import Router
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.models.load import load_model
from engine.models.registry import model_spec
from tests.engine.checkpoints import reference, reference_greedy, reference_logits
from tests.engine.driver import BLOCK, Driver, LogitDriver, alone_and_together
from tests.engine.models.test_experts import save_checkpoint, some_ids

V2_LITE: dict[str, Any] = {  # the fields of deepseek-ai/DeepSeek-V2-Lite
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "eos_token_id": 100001,
    "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
V3: dict[str, Any] = V2_LITE | {  # what differs in deepseek-ai/DeepSeek-V3, in floats
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "first_k_dense_replace": 3, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
}  # fmt: skip


def test_configurations_as_published() -> None:
    lite, v3 = model_spec(V2_LITE), model_spec(V3)
    assert lite.latent is not None and (lite.latent.query, lite.head_dim) == (0, 576)
    # 192 ** -0.5 * (0.1 * 0.707 * ln(40) + 1) ** 2
    assert lite.query_scale == pytest.approx(0.0721688 * 1.2608047**2, rel=1e-5)
    assert lite.experts is not None and v3.experts is not None
    assert (lite.experts.shared, lite.experts.groups, lite.experts.normed) == (2816, 1, False)
    assert (v3.experts.groups, v3.experts.active_groups, v3.experts.factor) == (8, 4, 2.5)
    assert v3.experts.sigmoid and v3.experts.layers == frozenset(range(3, 61))
    assert lite.context == 163840


def test_the_cache_holds_one_head_of_latent_vectors(tmp_path: Path) -> None:
    """26 + 10 values in float32 a position and layer, not 4 heads of keys and values."""
    driver = Driver(save_checkpoint(tmp_path, "deepseek-v3"), dtype="float32")
    assert driver.runner.block_bytes == 3 * BLOCK * (26 + 10) * 4


@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v3"])
def test_answers_do_not_depend_on_the_batch(case: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, case)
    prompts = [some_ids(9 + 7 * n)[n:] for n in range(5)]
    alone, together = alone_and_together(checkpoint, prompts)
    assert together == alone


@pytest.mark.parametrize("setting", [{"quantization": "int8"}, {"kv_dtype": "int8"}])
def test_rounded_weights_and_keys_in_8_bits(setting: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, "deepseek-v2")
    ids = some_ids(40)
    expected = reference_logits(reference(checkpoint), ids)
    driver = LogitDriver(checkpoint, dtype="float32", **setting)
    found = driver.logits(driver.sequence(ids), 40)
    # Near for most tokens: where two experts are nearly equal, another one may be chosen.
    assert 0 < (found - expected).abs().mean(1).median() < 0.1 * expected.std()


@pytest.mark.parametrize(
    ("raw", "changes", "told"),
    [
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': use greedy"),
        (V2_LITE, {"num_experts_per_tok": 65}, "num_experts_per_tok is 65, of 64 experts"),
        (V3, {"rope_interleave": False}, "rope_interleave false is not supported"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq other than 1 is not supported"),
        (V3, {"qk_rope_head_dim": 63}, "an odd qk_rope_head_dim"),
        (V3, {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        (V3, {"n_group": 7}, "8 of 256 experts from 4 of 7 groups cannot be chosen"),
        (V3, {"topk_group": 9}, "from 9 of 8 groups cannot be chosen"),
        (V3, {"n_group": 256, "topk_group": 4}, "8 of 256 experts from 4 of 256 groups"),
        (V3, {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fp8 in .e5m2. are"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(
    raw: dict[str, Any], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        model_spec(raw | changes)


@pytest.mark.parametrize("name", ["self_attn.kv_b_proj.weight", "mlp.gate.e_score_correction_bias"])
def test_a_tensor_that_is_missing_or_of_another_shape(name: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, "deepseek-v3")
    path, name = checkpoint / "model.safetensors", f"model.layers.1.{name}"
    tensors = load_file(path)
    whole = tensors.pop(name)
    for changed, told in (({}, "is missing"), ({name: whole[:-1].contiguous()}, "has shape")):
        save_file(tensors | changed, path, {"format": "pt"})
        with pytest.raises(CheckpointError, match=told) as caught:
            load_model(EngineConfig(model=str(checkpoint)))
        assert name in caught.value.message


def adapter_of(folder: Path, modules: dict[str, tuple[int, int]]) -> tuple[Path, dict[str, Any]]:
    """An adapter of rank 3 in PEFT's layout, and what it adds to each weight."""
    folder.mkdir()
    random = torch.Generator().manual_seed(3)
    tensors, added = {}, {}
    for name, (out, width) in modules.items():
        a, b = (torch.randn(*s, generator=random) * 0.12 for s in ((3, width), (out, 3)))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        added[f"{name}.weight"] = 2.0 * (b @ a)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rsplit(".", 1)[1] for name in modules})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, added


@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v3"])
def test_greedy_tokens_with_and_without_an_adapter(case: str, tmp_path: Path) -> None:
    """Of the first layer's MLP, beside rows without one; the reference has it in its weights."""
    checkpoint = save_checkpoint(tmp_path / "base", case)
    names = {f"model.layers.0.mlp.{name}_proj": (112, 64) for name in ("gate", "up")}
    adapter, added = adapter_of(
        tmp_path / "adapter", names | {"model.layers.0.mlp.down_proj": (64, 112)}
    )
    driver = Driver(checkpoint, dtype="float32", max_adapter_slots=1, max_lora_rank=3)
    handle = driver.adapter(adapter, 0)
    sequences = [driver.sequence(some_ids(19)), driver.sequence(some_ids(19), adapter=handle)]
    driver.run(sequences, chunk=11, count=8)
    model = reference(checkpoint)
    expected = [reference_greedy(model, some_ids(19), 8)]
    with torch.no_grad():
        for name, change in added.items():
            model.get_parameter(name).add_(change)
    expected.append(reference_greedy(model, some_ids(19), 8))
    assert [sequence.output for sequence in sequences] == expected
    assert expected[0] != expected[1]


def test_groups_are_chosen_before_experts() -> None:
    """By hand: the best expert is in a group that is worse as a whole, and is not used."""
    spec = model_spec(
        V3 | {"n_routed_experts": 6, "n_group": 3, "topk_group": 1, "num_experts_per_tok": 2}
    ).experts
    assert spec is not None
    scores = torch.tensor(
        [[3.0, -9.0, 1.0, 1.5, -1.0, 0.0]]
    )  # sigmoids: .95 .00 | .73 .82 | .27 .5
    router = Router(spec, torch.eye(6), correction=torch.zeros(6))
    shares, chosen = router(scores)
    assert chosen.tolist() == [[3, 2]]
    torch.testing.assert_close(
        shares, torch.tensor([[0.8176, 0.7311]]) * 2.5 / 1.5486, atol=1e-3, rtol=0
    )
