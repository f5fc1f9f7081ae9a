"""The request body for an OpenAI-compatible server, and the parameters that each server supports."""

import hashlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from gateway.catalog.upstreams import SALTED_ENGINES
from gateway.engines.upstream_scores import ROUTES as SCORES
from gateway.engines.upstream_scores import scores_body
from gateway.prompts.tool_lists import GATEWAY_MARKS
from gateway.request.engine import Job
from gateway.request.inference import EXTRA, InferenceRequest
from gateway.request.media_parts import CAPABILITIES
from gateway.request.plain_messages import PlainMessages

_TOOL_FIELDS = frozenset(("type", "function"))  # OpenAI's own, of a function
_PLAIN_FIELDS = ("role", "content")  # those of most messages
# What a request needs, which its tools and parts say themselves.
_NOT_SENT = frozenset(("strict", *CAPABILITIES))
# OpenAI's own parameters, which every compatible server has.
_OWN = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
_TUNING = (*_OWN, *EXTRA)
_UNSET = (*(None for _ in _OWN), *EXTRA.values())
_tuning = attrgetter(*_TUNING)
_COMMON_EXTRA = frozenset(
    (
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "chat_template_kwargs",
    )
)
_DRY = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers")
# Parameters beyond OpenAI's that each kind of server supports, from its documentation.
KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": frozenset(),
        "vllm": _COMMON_EXTRA
        | {"bad_words", "allowed_token_ids", "continue_final_message", "reasoning_effort"}
        | {"include_stop_str_in_output", "truncate_prompt_tokens", "truncation_side"}
        | {"use_beam_search", "length_penalty", "logprob_token_ids"},
        "sglang": _COMMON_EXTRA | {"continue_final_message", "reasoning_effort"},
        "tensorrt-llm": _COMMON_EXTRA,
        "llama.cpp": frozenset(
            (
                "top_k",
                "min_p",
                "typical_p",
                "top_n_sigma",
                *_DRY,
                "repetition_penalty",
                "ignore_eos",
                "chat_template_kwargs",
                "continue_final_message",
            )
        ),
        "dynamo": frozenset(("top_k", "repetition_penalty", "ignore_eos")),
        "ollama": frozenset(("reasoning_effort",)),
        "lmstudio": frozenset(("top_k", "repetition_penalty")),
        "tgi": frozenset(),
    }
)
_CONTINUOUS_USAGE = frozenset(("vllm", "sglang"))
_RENAMED = {(kind, "repetition_penalty"): "repeat_penalty" for kind in ("llama.cpp", "lmstudio")}


def lora_name(digest: str) -> str:
    """A name from the weights' digest, since two tenants may use one name for different adapters."""
    return f"tollhouse-{digest[:32]}"


def upstream_body(
    job: Job,
    model: str,
    kind: str = "",
    *,
    shared_cache: bool = False,
    reasoning_back: bool = False,
) -> dict[str, Any]:
    """The server decides how long an answer may be that the client left open, or whose `max_tokens` is
    reduced to the rest of the context: it alone knows exactly how long the prompt is."""
    request, adapter = job.request, job.engine_request.adapter
    named = lora_name(adapter) if adapter is not None else model
    if request.route in SCORES:
        return scores_body(request, named)
    if request.inputs is not None:
        texts = {"model": named, "input": request.inputs, **request.extra["embeddings"]}
        first = request.truncate_prompt_tokens
        return texts if first is None else {**texts, "truncate_prompt_tokens": first}
    body: dict[str, Any] = {"model": named, "stream": request.stream}
    if request.max_tokens is not None:
        limit = job.engine_request.sampling.max_tokens
        if limit >= request.max_tokens:
            body["max_tokens"] = limit
    if request.messages is not None:
        _chat(request, body)
        if reasoning_back and request.tool_reasoning:
            body["messages"] = _with_reasoning(body["messages"], request.tool_reasoning)
    else:
        body["prompt"] = request.prompts[0]
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
    if (given := _tuning(request)) != _UNSET:
        for name, value, unset in zip(_TUNING, given, _UNSET, strict=True):
            if value != unset:
                body[_RENAMED.get((kind, name), name)] = value
    if request.continue_final_message:
        body["add_generation_prompt"] = False
    if request.n > 1:
        body["n"] = request.n
    body |= request.extra_fields
    if request.stop:
        body["stop"] = list(request.stop)
    if request.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
    if request.stream:
        # Usage on every chunk makes the bill exact where the client leaves early. With several
        # choices some servers report each choice alone.
        continuous = kind in _CONTINUOUS_USAGE and request.n == 1
        every = {"continuous_usage_stats": True} if continuous else {}
        body["stream_options"] = {"include_usage": True, **every}
    if not shared_cache:
        body |= _cache_isolation(kind, job.engine_request.namespace)
    return body


def _cache_isolation(kind: str, namespace: str) -> dict[str, Any]:
    """Keep tenants apart in the server's prefix cache: latency would reveal whether a prompt was seen
    before. Empty where the kind of server cannot."""
    if kind in SALTED_ENGINES:
        return {"cache_salt": hashlib.sha256(namespace.encode()).hexdigest()[:32]}
    return {"cache_prompt": False} if kind == "llama.cpp" else {}


def path_of(request: InferenceRequest) -> str:
    if request.inputs is not None:
        return request.route if request.route in SCORES else "/v1/embeddings"
    return "/v1/chat/completions" if request.messages is not None else "/v1/completions"


def _chat(request: InferenceRequest, body: dict[str, Any]) -> None:
    messages = request.messages or []
    body["messages"] = (
        messages  # nothing to remove
        if type(messages) is PlainMessages
        else [
            message
            if len(message) == len(_PLAIN_FIELDS) and isinstance(message.get("content"), str)
            else _without_gateway_fields(message)
            for message in messages
        ]
    )
    if request.tools:
        body["tools"] = [
            tool if tool.keys() <= _TOOL_FIELDS else _without(tool) for tool in request.tools
        ]
        if request.single_tool_call:
            body["parallel_tool_calls"] = False
    body |= {
        name: value for name, value in request.engine_parameters.items() if name not in _NOT_SENT
    }
    if request.logprobs is not None:
        body["logprobs"] = True
        body["top_logprobs"] = request.logprobs


def _with_reasoning(
    messages: Sequence[Mapping[str, Any]], reasoning: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    named = [(each, each.get("tool_calls")) for each in messages]
    return [
        {**message, "reasoning_content": reasoning[calls[0]["id"]]}
        if calls and calls[0].get("id") in reasoning
        else message
        for message, calls in named
    ]


def _text_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One part of plain text as a string, which every server reads; llama-cpp-python reads nothing
    else."""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"} and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _without_gateway_fields(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        # A turn of calls may have no text, which OpenAI's API writes as null.
        parts = [_without(part) for part in content]
        message = {**message, "content": _text_of(parts) if parts else None}
    return message if message.keys().isdisjoint(GATEWAY_MARKS) else _without(message)


def _without(holder: dict[str, Any]) -> dict[str, Any]:
    """Without hints for prompt order, which some servers refuse as unknown fields."""
    return {name: value for name, value in holder.items() if name not in GATEWAY_MARKS}
