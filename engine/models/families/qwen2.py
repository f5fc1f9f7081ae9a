"""Qwen2 and 2.5: biases on query, key and value; an optional window on the upper layers."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, layer_windows

ARCHITECTURE = "Qwen2ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    return replace(base_spec(raw), windows=_upper_layer_windows(raw))


def _upper_layer_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on have a sliding window, if `use_sliding_window` is set."""
    layers: int = raw["num_hidden_layers"]
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window") is None:
        return (None,) * layers
    first = raw.get("max_window_layers", layers)
    return layer_windows(raw, [layer >= first for layer in range(layers)])
