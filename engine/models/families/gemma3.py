"""Gemma 3: Gemma 2's block with norms of heads in place of caps, and two rotations: layers with a
window have one of a smaller base."""

from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, layer_windows, positive, rope_spec

ARCHITECTURE = "Gemma3ForCausalLM"
# What configurations leave out, as Google's own do.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "eos_token_id": 1,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = _DEFAULTS | raw
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported")
    whole, local = rotations(raw)
    base = base_spec(raw | {"rope_parameters": whole})
    every = positive(raw, "sliding_window_pattern", 6)
    return replace(
        base,
        local_rope=rope_spec(raw | {"rope_parameters": local}, base.head_dim),
        windows=layer_windows(raw, [(layer + 1) % every != 0 for layer in range(base.layers)]),
        query_scale=positive(raw, "query_pre_attn_scalar", 256) ** -0.5,
        head_norm=True,
        unit_offset_norm=True,
        norms_after=True,
        embedding_scale=base.hidden**0.5,
        rounded_embedding_scale=True,
        attention_cap=raw.get("attn_logit_softcapping"),
        logit_cap=raw.get("final_logit_softcapping"),
    )


def rotations(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of full layers, and of those with a window: by kind of layer, or as older files have them."""
    given = raw.get("rope_parameters") or {}
    whole = dict(given.get("full_attention") or raw.get("rope_scaling") or {})
    local = dict(given.get("sliding_attention") or {})
    whole.setdefault("rope_theta", raw.get("rope_theta", 1000000.0))
    local.setdefault("rope_theta", raw.get("rope_local_base_freq", 10000.0))
    if whole.get("rope_type") == "linear" and whole.get("factor"):
        # The context in the configuration has the factor already, which `linear` would add again.
        divisors = [whole["factor"]] * (raw["head_dim"] // 2)
        whole |= {"rope_type": "divided", "divisors": divisors, "factor": None}
    return whole, local
