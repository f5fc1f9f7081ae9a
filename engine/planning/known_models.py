"""Shapes of published models by name, from `known_models.json`, so that a plan needs no download."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from engine.planning.model_shape import ModelShape, shape_of

_FILE = Path(__file__).with_name("known_models.json")
# What names of repositories add to a model's: how it was tuned, when, and how it was rounded.
_ADDED = re.compile(
    r"[-_.](instruct|chat|it|hf|base|fp8|fp4|nvfp4|mxfp4|int8|int4|awq|gptq|w\d+a\d+|bf16|fp16|dynamic|block"
    r"|v0\.\d|\d{4}|thinking|gguf|quantized|nvfp4-v2)$"
)


@cache
def _raw() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())["models"]
    return found


def known_names() -> list[str]:
    return sorted(_raw())


def plain_name(model: str) -> str:
    """`meta-llama/Llama-3.1-70B-Instruct-FP8` is `llama-3.1-70b`."""
    name = model.rsplit("/", 1)[-1].strip().lower()
    name = name.removeprefix("meta-")
    while (shorter := _ADDED.sub("", name)) != name:
        name = shorter
    return name


@cache
def known_shape(model: str) -> ModelShape | None:
    """None for a model that the table does not have."""
    name = plain_name(model)
    raw = _raw().get(name)
    return None if raw is None else shape_of(raw, name)
