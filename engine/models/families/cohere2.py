"""Command R7B and A: Command R, of whose layers some have a window, and the others no positions."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import layer_windows, positive
from engine.models.families import cohere

ARCHITECTURE = "Cohere2ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    base = cohere.spec(raw | {"use_qk_norm": False})
    every = positive(raw, "sliding_window_pattern", 4)
    usual = [(layer + 1) % every != 0 for layer in range(base.layers)]
    windows = layer_windows({"sliding_window": 4096} | raw, usual)
    whole = frozenset(layer for layer, window in enumerate(windows) if window is None)
    return replace(base, windows=windows, unrotated=whole)
