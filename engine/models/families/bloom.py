"""BLOOM: ALiBi, layer norms with biases, one of them of the embedding, and an MLP without a gate."""

from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import AlibiSpec, ModelSpec
from engine.models.alibi_slopes import halving_slopes
from engine.models.config_values import base_spec, positive, positive_number

ARCHITECTURE = "BloomForCausalLM"
# What this family's configurations call the fields that others share.
ALIASES = {
    "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embed",
    "max_position_embeddings": "seq_length",
}  # fmt: skip
RENAMED = (
    ("model.embed_tokens.", "transformer.word_embeddings."),
    ("model.embed_norm.", "transformer.word_embeddings_layernorm."),
    ("model.norm.", "transformer.ln_f."),
    ("model.layers.", "transformer.h."),
    ("self_attn.qkv_proj", "self_attention.query_key_value"),
    ("self_attn.o_proj", "self_attention.dense"),
    ("mlp.up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)


def spec(raw: dict[str, Any]) -> ModelSpec:
    if raw.get("apply_residual_connection_post_layernorm"):
        raise CheckpointError(
            "config.json: apply_residual_connection_post_layernorm is not supported"
        )
    given = {
        "num_key_value_heads": positive(raw, "num_attention_heads"),
        "intermediate_size": 4 * positive(raw, "hidden_size"),
        "hidden_act": "silu",
    }
    base = base_spec({"max_position_embeddings": 2048, "tie_word_embeddings": True} | raw | given)
    return replace(
        base,
        eps=positive_number(raw, "layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        gated=False,
        layer_norm=True,
        embedding_norm=True,
        alibi=AlibiSpec(halving_slopes(base.heads)),
        unrotated=frozenset(range(base.layers)),
        fused=("self_attn.qkv_proj",),
        grouped=True,
        renamed=RENAMED,
    )
