"""Gemma 2: soft caps, alternating windows, norms before and after each half, scaled embeddings."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, layer_windows

ARCHITECTURE = "Gemma2ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    base = base_spec(raw | {"tie_word_embeddings": raw.get("tie_word_embeddings", True)})
    return replace(
        base,
        windows=layer_windows(raw, [layer % 2 == 0 for layer in range(base.layers)]),
        query_scale=raw.get("query_pre_attn_scalar", base.head_dim) ** -0.5,
        unit_offset_norm=True,
        norms_after=True,
        embedding_scale=base.hidden**0.5,
        rounded_embedding_scale=True,
        attention_cap=raw.get("attn_logit_softcapping"),
        logit_cap=raw.get("final_logit_softcapping"),
    )
