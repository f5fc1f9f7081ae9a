"""Qwen3: no biases, and each query and key head is normed before the rotation."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.families import qwen2

ARCHITECTURE = "Qwen3ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    return replace(qwen2.spec(raw), head_norm=True)
