"""Phi-3, 3.5 and 4: one matrix for query, key and value, one for gate and up, LongRoPE, and in the small
models of Phi-4 a rotation of a part of each head."""

from dataclasses import replace
from typing import Any

from engine.backends.layers.matrices import FUSED
from engine.model_spec import ModelSpec
from engine.models.config_values import rope_spec
from engine.models.families import mistral

ARCHITECTURE = "Phi3ForCausalLM"
_LONGROPE_NAMES = ("su", "yarn")  # what the first checkpoints call it


def spec(raw: dict[str, Any]) -> ModelSpec:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if scaling and scaling.get("rope_type", scaling.get("type")) in _LONGROPE_NAMES:
        raw = raw | {"rope_parameters": scaling | {"rope_type": "longrope"}}
    plain = {"rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": 1.0}
    base = mistral.spec({"rms_norm_eps": 1e-5} | raw | plain)
    return replace(base, rope=rope_spec(raw, base.head_dim, partly=True), fused=tuple(FUSED))
