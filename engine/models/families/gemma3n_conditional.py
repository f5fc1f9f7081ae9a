"""Gemma 3n with towers for images and sound: the text part is served, and the towers are not loaded."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.families import gemma3n
from engine.models.families.gemma3_conditional import text_part

ARCHITECTURE = "Gemma3nForConditionalGeneration"


def spec(raw: dict[str, Any]) -> ModelSpec:
    return replace(gemma3n.spec(text_part(raw)), root="model.language_model")
