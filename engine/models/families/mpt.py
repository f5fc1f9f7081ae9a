"""MPT: ALiBi, layer norms, an MLP without a gate, and no biases."""

from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import AlibiSpec, ModelSpec
from engine.models.alibi_slopes import mpt_slopes
from engine.models.config_values import base_spec, positive, positive_number

ARCHITECTURE = "MptForCausalLM"
ALIASES = {
    "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model",
    "max_position_embeddings": "max_seq_len",
}  # fmt: skip
_RENAMED = (
    ("model.embed_tokens.", "transformer.wte."), ("model.norm.", "transformer.norm_f."),
    ("model.layers.", "transformer.blocks."), ("self_attn.qkv_proj", "attn.Wqkv"),
    ("self_attn.o_proj", "attn.out_proj"), ("mlp.up_proj", "ffn.up_proj"),
    ("mlp.down_proj", "ffn.down_proj"), ("post_attention_layernorm", "norm_2"),
    ("input_layernorm", "norm_1"),
)  # fmt: skip


def spec(raw: dict[str, Any]) -> ModelSpec:
    attention = raw.get("attn_config") or {}
    for wrong, name in (
        (not attention.get("alibi", True), "attn_config.alibi false"),
        (attention.get("qk_ln"), "attn_config.qk_ln"),
        (attention.get("prefix_lm"), "attn_config.prefix_lm"),
        (attention.get("attn_type", "multihead_attention") != "multihead_attention", "attn_type"),
        (raw.get("logit_scale") is not None, "logit_scale"),
    ):
        if wrong:
            raise CheckpointError(f"config.json: {name} is not supported")
    given = {
        "num_key_value_heads": positive(raw, "num_attention_heads"),
        "intermediate_size": positive(raw, "expansion_ratio", 4) * positive(raw, "hidden_size"),
        "hidden_act": "silu",
    }
    base = base_spec({"tie_word_embeddings": True} | raw | given)
    last = positive_number(attention, "alibi_bias_max", 8)
    return replace(
        base,
        eps=positive_number(raw, "layer_norm_epsilon", 1e-5),
        activation="gelu",
        gated=False,
        layer_norm=True,
        query_scale=positive_number(attention, "softmax_scale", base.query_scale),
        qkv_cap=positive_number(attention, "clip_qkv", 1.0) if attention.get("clip_qkv") else None,
        alibi=AlibiSpec(mpt_slopes(base.heads, last)),
        unrotated=frozenset(range(base.layers)),
        fused=("self_attn.qkv_proj",),
        renamed=_RENAMED,
    )
