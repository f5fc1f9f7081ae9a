"""Mistral: Llama's block with a sliding window in every layer."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, layer_windows

ARCHITECTURE = "MistralForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    slides = raw.get("sliding_window") is not None
    windows = layer_windows(raw, [slides] * raw["num_hidden_layers"])
    return replace(base_spec(raw), windows=windows)
