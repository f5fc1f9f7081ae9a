"""Truncates chats that exceed the context, and estimates the length of texts."""

from collections.abc import Sequence
from functools import cache

from msgspec.structs import replace

from gateway.inference.request import InferenceRequest
from gateway.prompts.context_budget import Count, Message, Truncation, fit
from gateway.prompts.rendering import render_chat
from gateway.prompts.tokenizing import TextCodec

_OUTPUT_SHARE = 8  # 1/8 of the context is reserved for output when max_tokens is not given


def truncate(
    request: InferenceRequest, codec: TextCodec | None, context_length: int, tenant_id: str
) -> InferenceRequest:
    """The request, truncated if it does not fit. Blocking: tokenizes the chat several times."""
    assert request.messages is not None
    count, rough = (_estimated, None) if codec is None else _counters(request, codec, tenant_id)
    if count(request.messages) <= context_length - (request.max_tokens or 1):
        return request
    limit = context_length - (request.max_tokens or max(1, context_length // _OUTPUT_SHARE))
    fitted = fit(request.messages, limit, count, Truncation(request.truncation), rough)
    return replace(request, messages=fitted.messages, dropped=fitted.effect)


def texts_of(request: InferenceRequest) -> tuple[str, ...]:
    """Every text that the client sent, in order."""
    if request.inputs is not None:
        return tuple(each for each in request.inputs if isinstance(each, str))
    if request.messages is None:
        return request.decoded_prompts or tuple(
            each for each in request.prompts if isinstance(each, str)
        )
    return _texts(request.messages)


def estimate(texts: Sequence[str]) -> int:
    """Tokens of texts for an upstream without a known tokenizer, at four bytes per token."""
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return max(1, size // 4 + 4 * len(texts))


def _texts(messages: Sequence[Message]) -> tuple[str, ...]:
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts += [part["text"] for part in content]
    return tuple(texts)


def _estimated(messages: list[Message]) -> int:
    return estimate(_texts(messages))


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
