"""What a picker reads of a request: its model, its prompt as text, and what the proxy asks for.

Headers and metadata are those of the Gateway API Inference Extension's picker protocol 1.0.0, and of
llm-d's router.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from gateway.engines.picker.learned_prefixes import block_keys

OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
_PROMPTS = ("messages", "prompt", "input")  # of chat and Messages, of completions, of Responses
_BEFORE = ("system", "instructions", "tools")  # which templates put before the messages
_BYTES_A_TOKEN = 4
_OUTPUT_TOKENS = 256  # for which a server should have free blocks


class Ask(msgspec.Struct, frozen=True):
    """A request to be placed."""

    model: str
    keys: list[bytes]  # of the prompt's leading blocks
    prompt_tokens: int
    output_tokens: int
    objective: str = ""
    fairness: str = ""
    subset: frozenset[str] | None = None  # ip:port to choose from; None: all


def ask_of(body: bytes, headers: Mapping[str, str], subset: frozenset[str] | None) -> Ask:
    """Never fails: what is no JSON object is placed by load alone, and the server refuses it."""
    try:
        fields = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:
        fields = {}
    fields = fields if isinstance(fields, dict) else {}
    model = fields.get("model")
    model = model if isinstance(model, str) else ""
    text = b"".join(orjson.dumps(each) for each in _prompt(fields)) or body
    most = fields.get("max_completion_tokens") or fields.get("max_tokens")
    salt = fields.get("cache_salt")
    root = f"{len(model)}:{model}{salt if isinstance(salt, str) else ''}"
    return Ask(
        model,
        list(block_keys(root, text)),
        max(1, len(text) // _BYTES_A_TOKEN),
        min(most, _OUTPUT_TOKENS) if isinstance(most, int) and most > 0 else _OUTPUT_TOKENS,
        _first(headers, OBJECTIVE),
        _first(headers, FAIRNESS),
        subset,
    )


def _prompt(fields: Mapping[str, Any]) -> list[Any]:
    return [fields[name] for name in (*_BEFORE, *_PROMPTS) if fields.get(name)]


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((headers[name] for name in names if headers.get(name)), "")
