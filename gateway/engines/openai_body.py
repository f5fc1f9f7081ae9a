"""The request body for an OpenAI-compatible server, and the parameters that each server supports."""

import hashlib
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from gateway.ask import Ask
from gateway.engines.base import Job

# Hints of ours for prompt order: removed, since some servers refuse unknown fields.
DOOR_MARKS = ("volatile", "rank")
# OpenAI's own parameters, which every compatible server has.
_OWN = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
# Parameters beyond OpenAI's: the field of `Ask`, and its value when it is not set.
EXTRA: Mapping[str, Any] = MappingProxyType(
    {
        "top_k": None,
        "min_p": None,
        "top_n_sigma": None,
        "repetition_penalty": None,
        "stop_token_ids": (),
        "min_tokens": 0,
        "ignore_eos": False,
    }
)
_TUNING = (*_OWN, *EXTRA)
_UNTUNED = (*(None for _ in _OWN), *EXTRA.values())
_tuning = attrgetter(*_TUNING)
_MOST = frozenset(EXTRA) - {"top_n_sigma"}
# Parameters beyond OpenAI's that each kind of server supports, from its documentation.
KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": frozenset(),
        "vllm": _MOST,
        "sglang": _MOST,
        "tensorrt-llm": _MOST,
        "llama.cpp": frozenset(
            ("top_k", "min_p", "top_n_sigma", "repetition_penalty", "ignore_eos")
        ),
        "dynamo": frozenset(("top_k", "repetition_penalty", "ignore_eos")),
        "tgi": frozenset(),
    }
)
_RENAMED = {("llama.cpp", "repetition_penalty"): "repeat_penalty"}


def lora_name(digest: str) -> str:
    """A name from the weights' digest, since two tenants may use one name for different adapters."""
    return f"tollhouse-{digest[:32]}"


def upstream_body(job: Job, model: str, kind: str = "") -> dict[str, Any]:
    ask, adapter = job.ask, job.request.adapter
    named = lora_name(adapter) if adapter is not None else model
    if ask.inputs is not None:
        return {"model": named, "input": ask.inputs, **ask.extra["embeddings"]}
    body: dict[str, Any] = {"model": named, "stream": ask.stream}
    body["max_tokens"] = job.request.sampling.max_tokens
    if ask.messages is not None:
        _chat(ask, body)
    else:
        body["prompt"] = ask.prompts[0]
        if ask.logprobs is not None:
            body["logprobs"] = ask.logprobs
    if (given := _tuning(ask)) != _UNTUNED:
        for name, value, nothing in zip(_TUNING, given, _UNTUNED, strict=True):
            if value != nothing:
                body[_RENAMED.get((kind, name), name)] = value
    if ask.n > 1:
        body["n"] = ask.n
    if ask.stop:
        body["stop"] = list(ask.stop)
    if ask.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in ask.logit_bias.items()}
    if ask.stream:
        body["stream_options"] = {"include_usage": True}
    if kind == "vllm":
        # Isolate tenants in its prefix cache: latency would reveal whether a prompt was seen before.
        body["cache_salt"] = hashlib.sha256(job.request.namespace.encode()).hexdigest()[:32]
    return body


def path_of(ask: Ask) -> str:
    if ask.inputs is not None:
        return "/v1/embeddings"
    return "/v1/chat/completions" if ask.messages is not None else "/v1/completions"


def _chat(ask: Ask, body: dict[str, Any]) -> None:
    body["messages"] = [_without_marks(message) for message in ask.messages or []]
    if ask.tools:
        body["tools"] = ask.tools
        if ask.one_call:
            body["parallel_tool_calls"] = False
    body |= {name: value for name, value in ask.beyond.items() if name != "strict"}
    if ask.logprobs is not None:
        body["logprobs"] = True
        body["top_logprobs"] = ask.logprobs


def _without_marks(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        parts = [{k: v for k, v in part.items() if k not in DOOR_MARKS} for part in content]
        message = {**message, "content": parts}
    if "volatile" in message:
        message = {k: v for k, v in message.items() if k != "volatile"}
    return message
