"""OpenAI's published schema of request bodies, stricter than the document: fields that it does not name
are refused, as strict servers do. Those that a kind of server documents beyond OpenAI's are below."""

import re
from functools import cache
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests.conftest import SPECS

FILE = SPECS / "openai-openapi.yaml"
SCHEMAS = {
    "/v1/chat/completions": "CreateChatCompletionRequest",
    "/v1/completions": "CreateCompletionRequest",
    "/v1/embeddings": "CreateEmbeddingRequest",
}
# Of vLLM, SGLang, llama.cpp and DeepSeek, from their documentation.
BEYOND = frozenset(
    (
        *("top_k", "min_p", "typical_p", "top_n_sigma", "repetition_penalty", "repeat_penalty"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers"),
        *("best_of", "use_beam_search", "length_penalty", "bad_words", "allowed_token_ids"),
        *("stop_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output"),
        *("truncate_prompt_tokens", "truncation_side", "logprob_token_ids", "lz_penalty"),
        *("chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
        *("structured_outputs", "cache_salt", "cache_prompt"),
    )
)
_REFERENCE = "#/components/schemas/"


@cache
def _sections() -> dict[str, str]:
    """The text of each schema: parsing the whole document takes seconds."""
    text = FILE.read_text().partition("\n  schemas:\n")[2]
    parts = re.split(r"^ {4}([\w.-]+):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _closed(part: Any, *, composed: bool = False) -> Any:
    """The schema, in which objects have no fields but those that it names."""
    if isinstance(part, list):
        return [_closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    closed = {
        name: [_closed(each, composed=True) for each in value]
        if name == "allOf"
        else _closed(value)
        for name, value in part.items()
        if name not in ("example", "examples", "default", "x-oaiMeta", "description")
        or isinstance(value, dict)
    }
    if closed.pop("nullable", False) is True:
        closed = {"anyOf": [closed, {"type": "null"}]}
    named = isinstance(part.get("properties"), dict) and part.get("type") == "object"
    if (named or "allOf" in part) and "additionalProperties" not in part and not composed:
        closed["unevaluatedProperties"] = False
    return closed


@cache
def validator(name: str) -> Draft202012Validator:
    needed, found = [name], {}
    composed: set[str] = set()
    while needed:
        each = needed.pop()
        if each not in found:
            schema = yaml.safe_load(_sections()[each])
            found[each] = schema
            for part in schema.get("allOf", ()) if isinstance(schema, dict) else ():
                composed.add(part.get("$ref", "").removeprefix(_REFERENCE))
            needed += re.findall(rf"{_REFERENCE}([\w.-]+)", str(schema))
    # A part of an `allOf` does not know the fields of the others.
    composed |= {
        each
        for one in tuple(composed)
        if one
        for each in re.findall(rf"{_REFERENCE}([\w.-]+)", str(found[one].get("allOf", "")))
    }
    schemas = {key: _closed(value, composed=key in composed) for key, value in found.items()}
    root = {"$ref": f"{_REFERENCE}{name}", "components": {"schemas": schemas}}
    return Draft202012Validator(root)


def faults(path: str, body: dict[str, Any], also: frozenset[str] = frozenset()) -> list[str]:
    """What OpenAI's API would refuse in the body, apart from fields that servers document and `also`.
    Empty for other paths, and where the document is absent."""
    if path not in SCHEMAS or not FILE.is_file():
        return []
    body = {name: value for name, value in body.items() if name not in BEYOND | also}
    if also and "messages" in body:
        kept = [{k: v for k, v in each.items() if k not in also} for each in body["messages"]]
        body["messages"] = kept
    options = body.get("stream_options")
    if isinstance(options, dict):  # vLLM's and SGLang's
        body["stream_options"] = {k: v for k, v in options.items() if k != "continuous_usage_stats"}
    return [
        f"{path}: {deepest.json_path}: {deepest.message[:300]}"
        for error in validator(SCHEMAS[path]).iter_errors(body)
        for deepest in [_deepest(error)]
    ]


def _deepest(error: Any) -> Any:
    while error.context:
        error = max(error.context, key=lambda each: len(each.absolute_path))
    return error
