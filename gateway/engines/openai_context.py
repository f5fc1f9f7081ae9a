"""The context length that an OpenAI-compatible server reports for a model."""

from typing import Any

import orjson

# Of an entry of /v1/models: vLLM and SGLang, then hosted services and LM Studio.
_NAMES = (
    "max_model_len",
    "loaded_context_length",
    "context_length",
    "context_window",
    "max_context_length",
)


def context_of(models: bytes, props: bytes, name: str) -> int:
    """In tokens; 0 if neither page reports it. `props` is llama.cpp's page, which knows how much of the
    model's context it serves; `name` is the model's name on the server."""
    settings = _object(_object(_parsed(props)).get("default_generation_settings"))
    if served := _count(settings.get("n_ctx")):
        return served
    listed = _object(_parsed(models)).get("data")
    entries = [_object(each) for each in listed] if isinstance(listed, list) else []
    named = [each for each in entries if each.get("id") == name] or entries[:1]
    return next((n for each in named for key in _NAMES if (n := _count(each.get(key)))), 0)


def _parsed(page: bytes) -> Any:
    try:
        return orjson.loads(page)
    except ValueError:
        return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
