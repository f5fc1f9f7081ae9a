"""Truncates chats that exceed the context, and estimates the length of texts."""

from collections.abc import Sequence
from functools import cache

from msgspec.structs import replace

from gateway.ask import Ask
from gateway.prompts.context_budget import Count, Message, Truncation, fit
from gateway.prompts.tokenizing import TextCodec
from gateway.prompts.writing import written_chat

_ANSWER_SHARE = 8  # 1/8 of the context is reserved for output when max_tokens is not given


def shortened(ask: Ask, codec: TextCodec | None, context_length: int, tenant_id: str) -> Ask:
    """The request, truncated if it does not fit. Blocking: tokenizes the chat several times."""
    assert ask.messages is not None
    count, rough = (_estimated, None) if codec is None else _counts(ask, codec, tenant_id)
    if count(ask.messages) <= context_length - (ask.max_tokens or 1):
        return ask
    limit = context_length - (ask.max_tokens or max(1, context_length // _ANSWER_SHARE))
    fitted = fit(ask.messages, limit, count, Truncation(ask.truncation), rough)
    return replace(ask, messages=fitted.messages, dropped=fitted.effect)


def texts_of(ask: Ask) -> tuple[str, ...]:
    """Every text that the client sent, in order."""
    if ask.inputs is not None:
        return tuple(each for each in ask.inputs if isinstance(each, str))
    if ask.messages is None:
        return ask.spoken or tuple(each for each in ask.prompts if isinstance(each, str))
    return _texts(ask.messages)


def estimate(texts: Sequence[str]) -> int:
    """Tokens of texts for an upstream without a known tokenizer, at four bytes per token."""
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return max(1, size // 4 + 4 * len(texts))


def _texts(messages: Sequence[Message]) -> tuple[str, ...]:
    found: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):
            found += [part["text"] for part in content]
    return tuple(found)


def _estimated(messages: list[Message]) -> int:
    return estimate(_texts(messages))


def _counts(ask: Ask, codec: TextCodec, tenant_id: str) -> tuple[Count, Count]:
    """(exact count, rough count). The rough one sums the texts, each encoded once."""
    length = cache(lambda text: len(codec.encode(text)))

    def _exact(messages: list[Message]) -> int:
        text = written_chat(ask.model, messages, ask.tools, codec)
        return len((text.pieces(tenant_id) or text).ids())

    def _rough(messages: list[Message]) -> int:
        return sum(length(text) for text in _texts(messages))

    return _exact, _rough
