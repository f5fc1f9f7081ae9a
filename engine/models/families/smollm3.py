"""SmolLM3: Llama's block, in which every fourth layer has no positions."""

from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, layer_windows, positive

ARCHITECTURE = "SmolLM3ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    base = base_spec({"tie_word_embeddings": True, "rope_theta": 2000000.0} | raw)
    unrotated = _unrotated(raw, base.layers)
    slides = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    windows = layer_windows(raw, [slides and n in unrotated for n in range(base.layers)])
    return replace(base, unrotated=unrotated, windows=windows)


def _unrotated(raw: dict[str, Any], layers: int) -> frozenset[int]:
    """`no_rope_layers` holds 1 for a layer with positions, and 0 for one without."""
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        interval = positive(raw, "no_rope_layer_interval", 4)
        return frozenset(n for n in range(layers) if (n + 1) % interval == 0)
    if not isinstance(rotated, list) or len(rotated) < layers:
        count = len(rotated) if isinstance(rotated, list) else 0
        raise CheckpointError(
            f"config.json: no_rope_layers has {count} entries for {layers} layers"
        )
    return frozenset(n for n in range(layers) if not rotated[n])
