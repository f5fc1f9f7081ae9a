"""Truncates chats that exceed the context, and estimates the length of texts."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import orjson
from msgspec.structs import replace

from gateway.catalog.codec.tokenizing import TextCodec
from gateway.prompts.context_budget import Count, Message, Truncation, fit
from gateway.prompts.rendering import render_chat
from gateway.request.inference import InferenceRequest
from gateway.request.plain_messages import PlainMessages

_TEMPLATE_TOKENS, _MOST_TEMPLATE_TOKENS = 4, 16  # of a chat template, for each text
_PLAIN_FIELDS = frozenset(("role", "content", "volatile"))
_OUTPUT_SHARE = 8  # 1/8 of the context is reserved for output when max_tokens is not given


def truncate(
    request: InferenceRequest, codec: TextCodec | None, context_length: int, tenant_id: str
) -> InferenceRequest:
    """The request, truncated if it does not fit. Blocking: tokenizes the chat several times."""
    assert request.messages is not None
    count: Count
    rough: Count | None
    if codec is None:
        count, rough = partial(_estimated, request), None
    else:
        count, rough = _counters(request, codec, tenant_id)
    if count(request.messages) <= context_length - (request.max_tokens or 1):
        return request
    limit = context_length - (request.max_tokens or max(1, context_length // _OUTPUT_SHARE))
    fitted = fit(request.messages, limit, count, Truncation(request.truncation), rough)
    return replace(request, messages=fitted.messages, dropped=fitted.effect)


def texts_of(request: InferenceRequest) -> tuple[str, ...]:
    """Every text that the client sent, in order."""
    if request.messages is None:
        raw = request.prompts if request.inputs is None else request.inputs
        return request.decoded_prompts or tuple(each for each in raw if isinstance(each, str))
    return _texts(request.messages)


def estimate(texts: Sequence[str]) -> int:
    """Likely tokens of texts for an upstream without a known tokenizer: four bytes per token, and
    four tokens of the chat template for each text."""
    return max(1, _bytes(texts) // 4 + _TEMPLATE_TOKENS * len(texts))


def most_tokens(texts: Sequence[str]) -> int:
    """The most tokens that texts can hold with any tokenizer: one per byte, and the template's."""
    return max(1, _bytes(texts) + _MOST_TEMPLATE_TOKENS * len(texts))


def counted_texts(request: InferenceRequest) -> tuple[str, ...]:
    """Every text that becomes part of the prompt: of a chat also tools, calls and names."""
    if request.messages is None:
        return texts_of(request)
    texts = [*_texts(request.messages)]
    texts += [_json(part) for message in request.messages for part in _other_parts(message)]
    texts += [_json(tool) for tool in request.tools or ()]
    texts += request.tool_reasoning.values()
    if request.chat_template_kwargs:
        texts.append(_json(request.chat_template_kwargs))
    if (schema := request.engine_parameters.get("response_format")) is not None:
        texts.append(_json(schema))
    return tuple(texts)


def _other_parts(message: Message) -> list[Any]:
    """A message's fields other than its role and content: calls, names, ids of calls."""
    return [each for name, each in message.items() if name not in _PLAIN_FIELDS and each]


def _json(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _texts(messages: Sequence[Message]) -> tuple[str, ...]:
    if type(messages) is PlainMessages:
        return messages.texts
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts += [part["text"] for part in content if "text" in part]
    return tuple(texts)


def _estimated(request: InferenceRequest, messages: list[Message]) -> int:
    return estimate(counted_texts(replace(request, messages=messages)))


def _counters(request: InferenceRequest, codec: TextCodec, tenant_id: str) -> tuple[Count, Count]:
    """(exact count, rough count). The rough one sums the texts, each encoded once."""
    length = cache(lambda text: len(codec.encode(text)))

    def _exact(messages: list[Message]) -> int:
        text = render_chat(
            request.model, messages, request.tools, codec, request.chat_template_kwargs
        )
        return len((text.pieces(tenant_id) or text).ids())

    def _rough(messages: list[Message]) -> int:
        return sum(length(text) for text in _texts(messages))

    return _exact, _rough
