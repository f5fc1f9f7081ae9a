"""Gemma 3n: several residual streams, inputs of each layer's own, gates of which few are above 0, and
last layers that read the keys and values of earlier ones."""

from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, layer_windows, rope_spec, within
from engine.models.families.gemma3 import rotations
from engine.models.streams.config import inner_size, sparsity, streams_spec

ARCHITECTURE = "Gemma3nForCausalLM"
# What configurations leave out, as Google's own do.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "eos_token_id": 1,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768,
    "sliding_window": 512, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15,
}  # fmt: skip


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = _DEFAULTS | raw
    whole, local = rotations(raw)
    base = base_spec(raw | {"rope_parameters": whole, "intermediate_size": inner_size(raw)})
    windows = layer_windows(raw, [(layer + 1) % 5 != 0 for layer in range(base.layers)])
    shared = within(raw, "num_kv_shared_layers", base.layers)
    if set(windows) != set(windows[: base.layers - shared]):
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {shared}: the layers before have no keys and "
            "values of one of their kinds"
        )
    return replace(
        base,
        local_rope=rope_spec(raw | {"rope_parameters": local}, base.head_dim),
        windows=windows,
        shared_layers=shared,
        query_scale=1.0,
        head_norm=True,
        value_norm=True,
        norms_after=True,
        embedding_scale=base.hidden**0.5,
        rounded_embedding_scale=True,
        logit_cap=raw["final_logit_softcapping"],
        sparsity=sparsity(raw, base.layers),
        streams=streams_spec(raw),
    )
