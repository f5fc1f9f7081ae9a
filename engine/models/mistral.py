"""Mistral: Llama's block with every layer looking back over a sliding window."""

from typing import Any

from engine.models.spec import ModelSpec, base_fields, layer_windows

ARCHITECTURE = "MistralForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    slides = raw.get("sliding_window") is not None
    windows = layer_windows(raw, [slides] * raw["num_hidden_layers"])
    return ModelSpec(**(base_fields(raw) | {"windows": windows}))
