"""Qwen3: no biases; each query and key head is normed before the rotation."""

from typing import Any

from engine.models.qwen2 import upper_layer_windows
from engine.models.spec import ModelSpec, base_fields

ARCHITECTURE = "Qwen3ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    fields = {"windows": upper_layer_windows(raw), "head_norm": True}
    return ModelSpec(**(base_fields(raw) | fields))
