"""OLMo 2: norms after attention and MLP only, and over all query and over all key heads."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec

ARCHITECTURE = "Olmo2ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    base = base_spec({"rms_norm_eps": 1e-5} | raw)
    return replace(base, norms_before=False, norms_after=True, row_norm=True)
