"""Llama 2 and 3: grouped-query attention, gated SiLU, rotary with the Llama-3 scaling."""

from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec

ARCHITECTURE = "LlamaForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    return base_spec(raw)
