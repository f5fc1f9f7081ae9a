"""Qwen3 MoE: Qwen3's block with a mixture of experts; the window, if any, is in every layer."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, layer_windows
from engine.models.families.qwen2_moe import mixture

ARCHITECTURE = "Qwen3MoeForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    base = base_spec(raw)
    slides = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    return replace(
        base,
        head_norm=True,
        windows=layer_windows(raw, [slides] * base.layers),
        experts=mixture(raw, base.layers, 128, 8),
    )
