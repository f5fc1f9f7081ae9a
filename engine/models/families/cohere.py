"""Command R: attention and MLP read one layer norm side by side, and pairs of neighbours are rotated."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, positive_number

ARCHITECTURE = "CohereForCausalLM"
_DEFAULTS = {"tie_word_embeddings": True, "max_position_embeddings": 8192}


def spec(raw: dict[str, Any]) -> ModelSpec:
    return replace(
        base_spec(_DEFAULTS | raw),
        eps=positive_number(raw, "layer_norm_eps", 1e-5),
        layer_norm=True,
        parallel=True,
        interleaved=True,
        head_norm=bool(raw.get("use_qk_norm", False)),
        norm_by_head=True,
        logit_scale=positive_number(raw, "logit_scale", 0.0625),
    )
