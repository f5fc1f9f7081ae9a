"""Phi-3 and 3.5: one matrix for query, key and value, one for gate and up, and LongRoPE."""

from dataclasses import replace
from typing import Any

from engine.layers.matrices import FUSED
from engine.model_spec import ModelSpec
from engine.models.families import mistral

ARCHITECTURE = "Phi3ForCausalLM"
_LONGROPE_NAMES = ("su", "yarn")  # what the first checkpoints call it


def spec(raw: dict[str, Any]) -> ModelSpec:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if scaling and scaling.get("rope_type", scaling.get("type")) in _LONGROPE_NAMES:
        raw = raw | {"rope_parameters": scaling | {"rope_type": "longrope"}}
    return replace(mistral.spec({"rms_norm_eps": 1e-5} | raw), fused=tuple(FUSED))
