"""Prepares a prompt for the engine: canonical order, chat template, token ids, context length.

Static content comes first so that requests share prefixes. The pipeline only calls `prepare`.
"""

import asyncio
from functools import cache

from msgspec import Struct, field
from msgspec.structs import replace

from core.errors import BadRequest, ContextLengthExceeded
from core.tenants.keys import Principal
from gateway.http.exchange import Headers
from gateway.inference.request import InferenceRequest
from gateway.prompts.prompt_order import PromptOrder, Volatile, reorder
from gateway.prompts.rendering import RenderedPrompt, render_prompt
from gateway.prompts.tokenizing import TextCodec
from gateway.prompts.truncation import estimate, texts_of, truncate
from gateway.prompts.volatile import volatile_rule

ORDER_HEADER = "x-tollhouse-prompt-order"
TRUNCATION_HEADER = "x-tollhouse-truncation"
_ORDERS = frozenset(PromptOrder)
_INLINE_CHARACTERS = 20_000  # longer prompts are encoded in a thread


class Prompt(Struct, frozen=True):
    request: InferenceRequest  # in the tenant's prompt order, as sent to the engine
    ids: list[int]  # of several prompts: concatenated
    max_tokens: int  # output tokens per choice: as requested, or the rest of the context
    headers: dict[str, str] = field(default_factory=dict)
    order: str | None = None  # for the usage event
    parts: tuple["Prompt", ...] = ()  # one per prompt when there are several

    @property
    def first_ids(self) -> list[int]:
        """The ids of the first prompt, which routing looks up in prefix caches."""
        return self.parts[0].ids if self.parts else self.ids

    def header_list(self) -> Headers:
        return [(name.encode(), value.encode()) for name, value in self.headers.items()]


async def prepare(
    request: InferenceRequest, codec: TextCodec | None, context_length: int, principal: Principal
) -> Prompt:
    if request.inputs is not None:
        return await asyncio.to_thread(prepare_embeddings, request, codec, context_length)
    if len(request.prompts) > 1:
        return await _prepare_several(request, codec, context_length, principal)
    request, order = apply_prompt_order(request, principal)
    if request.truncation != "disabled" and request.messages is not None:
        request = await asyncio.to_thread(
            truncate, request, codec, context_length, principal.tenant_id
        )
    headers = {ORDER_HEADER: order} if order else {}
    if request.dropped:
        headers[TRUNCATION_HEADER] = request.dropped
    if codec is None:
        return replace(_prepare_estimated(request, context_length), headers=headers, order=order)
    if request.prompts and isinstance(request.prompts[0], list):
        ids = _check_ids(request.prompts[0], codec.vocab_size)
        request = replace(
            request, decoded_prompts=(codec.tokenizer.decode(ids, skip_special_tokens=False),)
        )
    else:
        ids = await _ids(render_prompt(request, codec), principal.tenant_id)
    if not ids:
        raise BadRequest(
            "The prompt is empty.", next_step="Send at least one token.", param=_param_name(request)
        )
    output_limit = _output_limit(request, len(ids), context_length)
    return Prompt(request, ids, output_limit, headers, order)


async def _prepare_several(
    request: InferenceRequest, codec: TextCodec | None, context_length: int, principal: Principal
) -> Prompt:
    """Each prompt has the whole context to itself."""
    parts = [
        await prepare(replace(request, prompts=(each,)), codec, context_length, principal)
        for each in request.prompts
    ]
    decoded_prompts = tuple(text for part in parts for text in part.request.decoded_prompts)
    ids = [token for part in parts for token in part.ids]
    request = replace(request, decoded_prompts=decoded_prompts)
    return Prompt(request, ids, parts[0].max_tokens, parts=tuple(parts))


async def _ids(text: RenderedPrompt, tenant_id: str) -> list[int]:
    """Long texts are encoded in a thread."""
    pieces = text.pieces(tenant_id)
    new = len(text.text) if pieces is None else pieces.new_characters
    encode = text.ids if pieces is None else pieces.ids
    if new > _INLINE_CHARACTERS or text.mark is not None:
        return await asyncio.to_thread(encode)
    return encode()


def apply_prompt_order(
    request: InferenceRequest, principal: Principal
) -> tuple[InferenceRequest, str | None]:
    """Applies the tenant's `prompt_order` setting (`off`, `safe` or `full`). Returns the request and
    the order with its changes, for example `full:tools+volatile`; None for a prompt without messages.
    """
    order_setting = principal.settings.get("prompt_order", PromptOrder.SAFE)
    if request.messages is None or order_setting not in _ORDERS:
        return request, None
    order = PromptOrder(order_setting)
    if order is not PromptOrder.FULL and not request.tools:
        return request, order.value
    rules = principal.settings.get("volatile") or {}
    try:
        rule = _rule(tuple(rules.get("kinds", ("dates", "ids"))), tuple(rules.get("patterns", ())))
    except ValueError as error:
        raise BadRequest(
            f"The organisation's `volatile` setting is invalid: {error}.",
            next_step="Ask an admin to correct `volatile` in the organisation's settings.",
        ) from None
    ordered = reorder(order, request.messages, request.tools or (), rule)
    if not ordered.changed:
        return request, order.value
    changed = replace(request, messages=ordered.messages, tools=ordered.tools or None)
    return changed, f"{order.value}:{'+'.join(ordered.changed)}"


@cache
def _rule(kinds: tuple[str, ...], patterns: tuple[str, ...]) -> Volatile:
    return volatile_rule(kinds, patterns)


def prepare_embeddings(
    request: InferenceRequest, codec: TextCodec | None, context_length: int
) -> Prompt:
    """Texts are counted one by one: each has the whole context to itself."""
    sizes: list[int] = []
    for each in request.inputs or ():
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
    return Prompt(request, [0] * sum(sizes), 1)


def _check_ids(ids: list[int], vocab_size: int) -> list[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"prompt contains the token id {token}; this model has ids 0 to {vocab_size - 1}.",
                next_step="Use ids of this model's tokenizer; /tokenize returns them.",
                param="prompt",
            )
    return ids


def _output_limit(request: InferenceRequest, prompt_tokens: int, context_length: int) -> int:
    output_limit = context_length - prompt_tokens
    requested = request.max_tokens
    if output_limit < 1 or (requested is not None and requested > output_limit):
        order_setting = f" and max_tokens is {requested}" if requested is not None else ""
        raise ContextLengthExceeded(
            f"The model's context is {context_length} tokens; the prompt has {prompt_tokens}"
            f"{order_setting}.",
            next_step="Shorten the prompt or max_tokens, or let truncation drop old turns.",
            param=_param_name(request) if output_limit < 1 else "max_tokens",
        )
    return requested if requested is not None else output_limit


def _prepare_estimated(request: InferenceRequest, context_length: int) -> Prompt:
    count = estimate(texts_of(request))
    return Prompt(request, [0] * count, _output_limit(request, count, context_length))


def _param_name(request: InferenceRequest) -> str:
    return "messages" if request.messages is not None else "prompt"
