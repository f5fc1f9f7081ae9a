"""Gemma 3 with a vision tower: the text part is served, and the tower is not loaded."""

from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.families import gemma3

ARCHITECTURE = "Gemma3ForConditionalGeneration"


def spec(raw: dict[str, Any]) -> ModelSpec:
    return replace(
        gemma3.spec(text_part(raw)),
        root="language_model.model",
        head="language_model.lm_head.weight",
    )


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, with its sibling fields."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: text_config is missing")
    return text | {
        name: raw[name] for name in ("eos_token_id", "tie_word_embeddings") if name in raw
    }
