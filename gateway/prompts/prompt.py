"""Prepares a prompt for the engine: canonical order, chat template, token ids, context length.

Static content comes first so that requests share prefixes. The pipeline only calls `prepare`.
"""

import asyncio
from functools import cache

from msgspec import Struct, field
from msgspec.structs import replace

from core.errors import BadRequest, ContextLengthExceeded
from core.tenants.keys import Principal
from gateway.ask import Ask
from gateway.exchange import Headers
from gateway.prompts.prompt_order import PromptOrder, Volatile, arrange
from gateway.prompts.shortening import estimate, shortened, texts_of
from gateway.prompts.tokenizing import TextCodec
from gateway.prompts.volatile import volatile_rule
from gateway.prompts.writing import Written, written

ORDER_HEADER = "x-tollhouse-prompt-order"
TRUNCATION_HEADER = "x-tollhouse-truncation"
_ORDERS = frozenset(PromptOrder)
_INLINE_CHARACTERS = 20_000  # longer prompts are encoded in a thread


class Prompt(Struct, frozen=True):
    ask: Ask  # in the tenant's prompt order, as sent to the engine
    ids: list[int]  # of several prompts: concatenated
    max_tokens: int  # output tokens per choice: as requested, or the rest of the context
    headers: dict[str, str] = field(default_factory=dict)
    order: str | None = None  # for the usage event
    parts: tuple["Prompt", ...] = ()  # one per prompt when there are several

    @property
    def lead(self) -> list[int]:
        """The ids of the first prompt, which routing looks up in prefix caches."""
        return self.parts[0].ids if self.parts else self.ids

    def header_list(self) -> Headers:
        return [(name.encode(), value.encode()) for name, value in self.headers.items()]


async def prepare(
    ask: Ask, codec: TextCodec | None, context_length: int, principal: Principal
) -> Prompt:
    if ask.inputs is not None:
        return await asyncio.to_thread(to_embed, ask, codec, context_length)
    if len(ask.prompts) > 1:
        return await _several(ask, codec, context_length, principal)
    ask, order = in_order(ask, principal)
    if ask.truncation != "disabled" and ask.messages is not None:
        ask = await asyncio.to_thread(shortened, ask, codec, context_length, principal.tenant_id)
    headers = {ORDER_HEADER: order} if order else {}
    if ask.dropped:
        headers[TRUNCATION_HEADER] = ask.dropped
    if codec is None:
        return replace(_estimated(ask, context_length), headers=headers, order=order)
    if ask.prompts and isinstance(ask.prompts[0], list):
        ids = _checked(ask.prompts[0], codec.vocab_size)
        ask = replace(ask, spoken=(codec.tokenizer.decode(ids, skip_special_tokens=False),))
    else:
        ids = await _ids(written(ask, codec), principal.tenant_id)
    if not ids:
        raise BadRequest(
            "The prompt is empty.", next_step="Send at least one token.", param=_field(ask)
        )
    room = _room(ask, len(ids), context_length)
    return Prompt(ask, ids, room, headers, order)


async def _several(
    ask: Ask, codec: TextCodec | None, context_length: int, principal: Principal
) -> Prompt:
    """Each prompt has the whole context to itself."""
    parts = [
        await prepare(replace(ask, prompts=(each,)), codec, context_length, principal)
        for each in ask.prompts
    ]
    spoken = tuple(text for part in parts for text in part.ask.spoken)
    ids = [token for part in parts for token in part.ids]
    ask = replace(ask, spoken=spoken)
    return Prompt(ask, ids, parts[0].max_tokens, parts=tuple(parts))


async def _ids(text: Written, tenant_id: str) -> list[int]:
    """Long texts are encoded in a thread."""
    pieces = text.pieces(tenant_id)
    new = len(text.text) if pieces is None else pieces.new_characters
    encode = text.ids if pieces is None else pieces.ids
    if new > _INLINE_CHARACTERS or text.mark is not None:
        return await asyncio.to_thread(encode)
    return encode()


def in_order(ask: Ask, principal: Principal) -> tuple[Ask, str | None]:
    """Applies the tenant's `prompt_order` setting (`off`, `safe` or `full`). Returns the request and
    the order with its changes, for example `full:tools+volatile`; None for a prompt without messages.
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
            f"The organisation's `volatile` setting is invalid: {error}.",
            next_step="Ask an admin to correct `volatile` in the organisation's settings.",
        ) from None
    made = arrange(order, ask.messages, ask.tools or (), rule)
    if not made.changed:
        return ask, order.value
    changed = replace(ask, messages=made.messages, tools=made.tools or None)
    return changed, f"{order.value}:{'+'.join(made.changed)}"


@cache
def _rule(kinds: tuple[str, ...], patterns: tuple[str, ...]) -> Volatile:
    return volatile_rule(kinds, patterns)


def to_embed(ask: Ask, codec: TextCodec | None, context_length: int) -> Prompt:
    """Texts are counted one by one: each has the whole context to itself."""
    sizes: list[int] = []
    for each in ask.inputs or ():
        if not isinstance(each, str):
            sizes.append(len(each))
        else:
            sizes.append(len(codec.encode(each, special=True)) if codec else estimate((each,)))
    for index, size in enumerate(sizes):
        # Without a tokenizer the size is an estimate; the upstream enforces its own limit.
        if codec is not None and size > context_length:
            raise ContextLengthExceeded(
                f"input[{index}] has {size} tokens; the model takes at most {context_length}.",
                next_step=f"Split input[{index}] into shorter texts.",
                param="input",
            )
    return Prompt(ask, [0] * sum(sizes), 1)


def _checked(ids: list[int], vocab_size: int) -> list[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"prompt contains the token id {token}; this model has ids 0 to {vocab_size - 1}.",
                next_step="Use ids of this model's tokenizer; /tokenize returns them.",
                param="prompt",
            )
    return ids


def _room(ask: Ask, prompt_tokens: int, context_length: int) -> int:
    room = context_length - prompt_tokens
    asked = ask.max_tokens
    if room < 1 or (asked is not None and asked > room):
        wanted = f" and max_tokens is {asked}" if asked is not None else ""
        raise ContextLengthExceeded(
            f"The model's context is {context_length} tokens; the prompt has {prompt_tokens}"
            f"{wanted}.",
            next_step="Shorten the prompt or max_tokens, or let truncation drop old turns.",
            param=_field(ask) if room < 1 else "max_tokens",
        )
    return asked if asked is not None else room


def _estimated(ask: Ask, context_length: int) -> Prompt:
    count = estimate(texts_of(ask))
    return Prompt(ask, [0] * count, _room(ask, count, context_length))


def _field(ask: Ask) -> str:
    return "messages" if ask.messages is not None else "prompt"
