"""The prompt as the engine gets it: canonical order, the chat template, token ids, the budget.

Static first, dynamic last, so that prefixes are shared. `prepare` is all that the pipeline calls.
"""

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from core.errors import BadRequest, ContextLengthExceeded
from core.tenants.keys import Principal
from gateway.ask import Ask
from gateway.exchange import Headers
from gateway.prompt_order import PromptOrder, Volatile, arrange
from gateway.tokenizing import TextCodec
from gateway.volatile import volatile_rule

ORDER_HEADER = "x-tollhouse-prompt-order"
_ORDERS = frozenset(PromptOrder)
_INLINE_CHARACTERS = 20_000  # longer prompts are encoded in a thread


@dataclass(frozen=True, slots=True)
class Prompt:
    ask: Ask  # as it goes to the engine: in the tenant's order
    ids: list[int]
    max_tokens: int  # of output for each choice: what was asked for, within the context
    texts: tuple[str, ...] = ()  # what the safety desk screens
    headers: dict[str, str] = field(default_factory=dict)
    order: str | None = None  # for the usage event

    def header_list(self) -> Headers:
        return [(name.encode(), value.encode()) for name, value in self.headers.items()]


async def prepare(
    ask: Ask, codec: TextCodec | None, context_length: int, principal: Principal
) -> Prompt:
    ask, order = in_order(ask, principal)
    headers = {ORDER_HEADER: order} if order else {}
    if codec is None:
        return replace(_estimated(ask, context_length), headers=headers, order=order)
    if isinstance(ask.prompt, list):
        ids = _checked(ask.prompt, codec.vocab_size)
    else:
        text = _rendered(ask, codec) if ask.messages is not None else ask.prompt or ""
        special = ask.messages is None
        if len(text) > _INLINE_CHARACTERS:
            ids = await asyncio.to_thread(codec.encode, text, special=special)
        else:
            ids = codec.encode(text, special=special)
    if not ids:
        raise BadRequest(
            "The prompt is empty.", next_step="Send at least one token.", param=_field(ask)
        )
    room = _room(ask, len(ids), context_length)
    return Prompt(ask, ids, room, texts_of(ask), headers, order)


def in_order(ask: Ask, principal: Principal) -> tuple[Ask, str | None]:
    """The tenant's order (`off`, `safe` or `full` under `prompt_order` in its settings), and what
    it changed: `safe`, or `full:tools+volatile`. Nothing is told of a prompt without messages.
    """
    wanted = principal.settings.get("prompt_order", PromptOrder.SAFE)
    if ask.messages is None or wanted not in _ORDERS:
        return ask, None
    order = PromptOrder(wanted)
    if order is not PromptOrder.FULL and not ask.tools:
        return ask, order.value
    rules = principal.settings.get("volatile") or {}
    try:
        rule = _rule(tuple(rules.get("kinds", ("dates", "ids"))), tuple(rules.get("patterns", ())))
    except ValueError as error:
        raise BadRequest(
            f"The organisation's rules of volatile blocks are wrong: {error}.",
            next_step="An admin can mend `volatile` in the organisation's settings.",
        ) from None
    made = arrange(order, ask.messages, ask.tools or (), rule)
    if not made.changed:
        return ask, order.value
    changed = replace(ask, messages=made.messages, tools=made.tools or None)
    return changed, f"{order.value}:{'+'.join(made.changed)}"


@cache
def _rule(kinds: tuple[str, ...], patterns: tuple[str, ...]) -> Volatile:
    return volatile_rule(kinds, patterns)


def texts_of(ask: Ask) -> tuple[str, ...]:
    """Every text that the client sent, in order."""
    if ask.messages is None:
        return (ask.prompt,) if isinstance(ask.prompt, str) else ()
    found: list[str] = []
    for message in ask.messages:
        content = message.get("content")
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):
            found += [part["text"] for part in content]
    return tuple(found)


def _rendered(ask: Ask, codec: TextCodec) -> str:
    if codec.template is None:
        raise BadRequest(
            f"The model {ask.model} has no chat template.",
            next_step="Use /v1/completions.",
            param="messages",
        )
    messages = [_plain(message) for message in ask.messages or []]
    tools = ask.tools
    if tools and not codec.template.takes_tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        messages.insert(0, {"role": "system", "content": f"Tools:\n{listed}"})
        tools = None
    return codec.template.render(messages, tools=tools)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    made = {k: v for k, v in message.items() if k not in ("cache_control", "volatile")}
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = "".join(part["text"] for part in content)
    if made["role"] == "developer":
        made["role"] = "system"
    return made


def _checked(ids: list[int], vocab_size: int) -> list[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"prompt has the token id {token}; this model knows 0 to {vocab_size - 1}.",
                next_step="Use ids of this model's tokenizer; /tokenize gives them.",
                param="prompt",
            )
    return ids


def _room(ask: Ask, prompt_tokens: int, context_length: int) -> int:
    room = context_length - prompt_tokens
    asked = ask.max_tokens
    if room < 1 or (asked is not None and asked > room):
        wanted = f" and asks for {asked} more" if asked is not None else ""
        raise ContextLengthExceeded(
            f"The model's context is {context_length} tokens; the prompt has {prompt_tokens}"
            f"{wanted}.",
            next_step="Shorten the prompt or max_tokens.",
            param=_field(ask) if room < 1 else "max_tokens",
        )
    return asked if asked is not None else room


def _estimated(ask: Ask, context_length: int) -> Prompt:
    """For a text engine whose tokenizer we lack: four bytes a token, until its usage says more."""
    texts = texts_of(ask)
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    count = max(1, size // 4 + 4 * len(texts))
    return Prompt(ask, [0] * count, _room(ask, count, context_length), texts)


def _field(ask: Ask) -> str:
    return "messages" if ask.messages is not None else "prompt"
