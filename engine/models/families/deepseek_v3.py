"""DeepSeek V3, V3.1 and R1: latent attention, and experts by sigmoids with a correction."""

from typing import Any

from engine.model_spec import ModelSpec
from engine.models.families.deepseek import deepseek_spec

ARCHITECTURE = "DeepseekV3ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    return deepseek_spec(raw, sigmoid=True)
