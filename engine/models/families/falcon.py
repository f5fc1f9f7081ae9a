"""Falcon: attention and MLP side by side, with rotation; or, of its first models, ALiBi and neither."""

from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import AlibiSpec, ModelSpec
from engine.models.alibi_slopes import halving_slopes
from engine.models.config_values import base_spec, positive, positive_number
from engine.models.families import bloom

ARCHITECTURE = "FalconForCausalLM"
_OWN_NORMS = (("post_attention_layernorm", "ln_mlp"), ("input_layernorm", "ln_attn"))


def spec(raw: dict[str, Any]) -> ModelSpec:
    new, parallel = bool(raw.get("new_decoder_architecture")), raw.get("parallel_attn", True)
    if new and not parallel:
        raise CheckpointError(
            "config.json: new_decoder_architecture without parallel_attn is not supported"
        )
    if raw.get("activation", "gelu") != "gelu":
        raise CheckpointError(f"config.json: activation is {raw['activation']!r}: use gelu")
    heads = positive(raw, "num_attention_heads")
    multi_query = raw.get("multi_query", True)
    kv_heads = positive(raw, "num_kv_heads", heads) if new else 1 if multi_query else heads
    hidden = positive(raw, "hidden_size")
    given = {
        "num_key_value_heads": kv_heads,
        "intermediate_size": positive(raw, "ffn_hidden_size", 4 * hidden),
        "max_position_embeddings": positive(raw, "max_position_embeddings", 2048),
        "hidden_act": "silu",
    }
    base = base_spec({"tie_word_embeddings": True} | raw | given)
    alibi = bool(raw.get("alibi"))
    norms = raw.get("num_ln_in_parallel_attn") or (2 if new else 1)
    return replace(
        base,
        eps=positive_number(raw, "layer_norm_epsilon", 1e-5),
        activation="gelu",
        gated=False,
        layer_norm=True,
        parallel=bool(parallel),
        parallel_norm=new and norms == 2,
        alibi=AlibiSpec(halving_slopes(heads), rounded=True) if alibi else None,
        unrotated=frozenset(range(base.layers)) if alibi else frozenset(),
        fused=("self_attn.qkv_proj",),
        grouped=True,
        renamed=bloom.RENAMED + (_OWN_NORMS if new and norms == 2 else ()),
    )
