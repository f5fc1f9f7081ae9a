"""Prepares a prompt for the engine: canonical order, chat template, token ids, context length.

Static content comes first so that requests share prefixes. The pipeline only calls `prepare_for`.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache

from msgspec import Struct, field
from msgspec.structs import replace

from core.errors import BadRequest, ContextLengthExceeded
from core.tenants.keys import Principal
from gateway.catalog.catalog import Target
from gateway.catalog.codec.encoding import TooManyTokens
from gateway.catalog.codec.prefix_tokens import Pieces
from gateway.catalog.codec.template_limits import RenderingTakesLong
from gateway.catalog.codec.tokenizing import INLINE_CHARACTERS, TextCodec
from gateway.prompts.capabilities import (
    check_capabilities,
    check_sampling_parameters,
    without_effort,
)
from gateway.prompts.embedded_texts import read_texts
from gateway.prompts.grammars import grammar_of
from gateway.prompts.predictions import predicted_ids, text_of
from gateway.prompts.prompt_order import PromptOrder, Volatile, reorder, volatile_rule
from gateway.prompts.rendering import RenderedPrompt, render_prompt
from gateway.prompts.tool_lists import tool_list
from gateway.prompts.truncation import counted_texts, estimate, most_tokens, texts_of, truncate
from gateway.request.exchange import Headers
from gateway.request.inference import InferenceRequest
from gateway.request.media_parts import CAPABILITIES, KINDS, RESERVED_TOKENS
from gateway.request.storing import check_may_store

ORDER_HEADER = "x-tollhouse-prompt-order"
TRUNCATION_HEADER = "x-tollhouse-truncation"
MAX_TOKENS_HEADER = (
    "x-tollhouse-max-tokens"  # where the context leaves fewer than the SDK's default
)
NOTE_HEADER = "x-tollhouse-note"
_SAFE, _FULL = PromptOrder.SAFE, PromptOrder.FULL
_ORDERS = {order.value: order for order in PromptOrder}
# Longer requests are prepared in a thread: their rendering alone may take half a millisecond.
_INLINE_CHARACTERS = 64_000
_INLINE_PROMPT = 20_000  # characters or ids, which are decoded
_INLINE_MESSAGES = 100

Held = Callable[[], AbstractAsyncContextManager[None]]


class Prompt(Struct, frozen=True):
    request: InferenceRequest  # in the tenant's prompt order, as sent to the engine
    ids: list[int]  # of several prompts: concatenated
    max_tokens: int  # output tokens per choice: as requested, or the rest of the context
    headers: dict[str, str] = field(default_factory=dict)
    order: str | None = None  # for the usage event
    parts: tuple["Prompt", ...] = ()  # one per prompt when there are several
    prediction: list[int] = field(default_factory=list)  # for the built-in engine's guesses
    most_tokens: int = 0  # without a tokenizer: the most that the prompt may turn out to have

    @property
    def reserved_tokens(self) -> int:
        """What limits and money are reserved for: never less than the prompt turns out to have."""
        count = len(self.ids)
        return count if count > self.most_tokens else self.most_tokens

    @property
    def first_ids(self) -> list[int]:
        """The ids of the first prompt, which routing looks up in prefix caches."""
        return self.parts[0].ids if self.parts else self.ids

    def header_list(self) -> Headers:
        return [(name.encode(), value.encode()) for name, value in self.headers.items()]


async def prepare_for(
    request: InferenceRequest, target: Target, principal: Principal, held: Held = nullcontext
) -> Prompt:
    """Prepare the prompt of a request that the target's model can serve; raises otherwise. `held` is
    entered around work that needs a thread."""
    if request.tool_reasoning and not target.model.reasoning_back:
        request = replace(request, tool_reasoning={})
    request, effort = without_effort(request, target.model)
    check_sampling_parameters(request, target.model)
    if "store" in request.extra:
        check_may_store(principal)
    notes: list[str] = [*request.extra.get("notes", ()), *effort]
    if "reasoning" not in target.model.capabilities:
        notes += request.extra.get("thinking_notes", ())
    if request.engine_parameters:
        notes += check_capabilities(request, target.model)
        if target.model.parameters is None:  # our own engine
            grammar_of(request)
    model = target.model
    prompt = await prepare(request, model.codec, model.context_length, principal, held)
    if request.inputs is not None and model.parameters is not None:
        prompt = replace(prompt, parts=())  # an upstream takes all texts in one call
    if request.prediction is not None and model.parameters is None and model.codec is not None:
        async with held():
            text = text_of(request.prediction)
            ids = await predicted_ids(text, model.codec, model.context_length)
        prompt = replace(prompt, prediction=ids)
    if notes:
        prompt.headers[NOTE_HEADER] = " ".join(notes)
    return prompt


async def prepare(
    request: InferenceRequest,
    codec: TextCodec | None,
    context_length: int,
    principal: Principal,
    held: Held = nullcontext,
) -> Prompt:
    """Long requests are prepared in a thread; of short ones, long texts are encoded in one."""
    target = _Target(codec, context_length, principal)
    if request.inputs is not None:
        async with held():
            return await asyncio.to_thread(_embedded, request, codec, context_length)
    if is_long(request):
        async with held():
            return await asyncio.to_thread(_prepare_now, request, target)
    if len(request.prompts) > 1:
        parts = [await _prepare_one(part, target, held) for part in _single_prompts(request)]
        return _joined(request, parts)
    return await _prepare_one(request, target, held)


class _Target(Struct, frozen=True):
    codec: TextCodec | None
    context_length: int
    principal: Principal


class _Draft(Struct, frozen=True):
    """A prompt before it is encoded."""

    request: InferenceRequest
    order: str | None
    text: RenderedPrompt | None = None
    pieces: Pieces | None = None
    ids: list[int] | None = None  # as the client sent them

    @property
    def new_characters(self) -> int:
        if self.pieces is not None:
            return self.pieces.new_characters
        return len(self.text.text) if self.text is not None else 0

    def encode(self, at_most: int | None) -> list[int]:
        if self.ids is not None:
            return self.ids
        assert self.text is not None
        return (self.pieces or self.text).ids(at_most)


def is_long(request: InferenceRequest) -> bool:
    """Whether preparing the request may take the event loop longer than a millisecond."""
    if request.truncation != "disabled" or request.inputs is not None:
        return True
    if request.messages is None:
        return sum(map(len, request.prompts)) > _INLINE_PROMPT
    # Tools are rendered as text too; five hundred are allowed.
    many = len(request.messages) > _INLINE_MESSAGES or len(request.tools or ()) > 16
    return many or sum(map(len, texts_of(request))) > _INLINE_CHARACTERS


def _prepare_now(request: InferenceRequest, target: _Target) -> Prompt:
    """Blocking; for a thread."""
    if len(request.prompts) > 1:
        return _joined(request, [_prepare_now(part, target) for part in _single_prompts(request)])
    draft = _draft(request, target)
    return _prompt(draft, _encode(draft, target.context_length), target)


async def _prepare_one(request: InferenceRequest, target: _Target, held: Held) -> Prompt:
    try:
        draft = _draft(request, target)
    except RenderingTakesLong:
        async with held():
            return await asyncio.to_thread(_prepare_now, request, target)
    marked = draft.text is not None and draft.text.mark is not None
    if marked or draft.new_characters > INLINE_CHARACTERS:
        async with held():
            ids = await asyncio.to_thread(_encode, draft, target.context_length)
            return _prompt(draft, ids, target)
    return _prompt(draft, _encode(draft, target.context_length), target)


def _draft(request: InferenceRequest, target: _Target) -> _Draft:
    codec, tenant_id = target.codec, target.principal.tenant_id
    request, order = apply_prompt_order(request, target.principal)
    if request.truncation != "disabled" and request.messages is not None:
        request = truncate(request, codec, target.context_length, tenant_id)
    if codec is None:
        if request.prompts and isinstance(request.prompts[0], list):
            raise _ids_without_tokenizer("prompt")
        return _Draft(request, order)
    if request.prompts and isinstance(request.prompts[0], list):
        ids = _kept(request.prompts[0], request)
        if len(ids) < target.context_length:  # otherwise it is refused unread
            _check_ids(ids, codec.vocab_size)
            text = codec.decode(ids, special=True)
            request = replace(request, decoded_prompts=(text,))
        return _Draft(request, order, ids=ids)
    rendered = render_prompt(request, codec)
    return _Draft(request, order, rendered, rendered.pieces(tenant_id))


def _kept(ids: list[int], request: InferenceRequest) -> list[int]:
    """The prompt's tokens without those that the client lets drop, at the side that it names."""
    most = request.truncate_prompt_tokens
    if most is None:
        return ids
    return ids[-most:] if request.truncation_side == "left" else ids[:most]


def _encode(draft: _Draft, context_length: int) -> list[int]:
    if draft.text is None and draft.ids is None:  # without a tokenizer
        return [0] * estimate(counted_texts(draft.request))
    if draft.request.truncate_prompt_tokens is not None:
        return _kept(draft.encode(None), draft.request)
    try:
        return draft.encode(context_length)
    except TooManyTokens as error:
        raise _too_long(draft.request, error.tokens, context_length) from None


def _prompt(draft: _Draft, ids: list[int], target: _Target) -> Prompt:
    request = draft.request
    if not ids:
        raise BadRequest(
            "The prompt is empty.", next_step="Send at least one token.", param=_param_name(request)
        )
    headers = {ORDER_HEADER: draft.order} if draft.order else {}
    if request.dropped:
        headers[TRUNCATION_HEADER] = request.dropped
    limit = _output_limit(request, len(ids), target.context_length)
    if request.max_tokens is not None and limit < request.max_tokens:
        headers[MAX_TOKENS_HEADER] = f"{limit}; requested={request.max_tokens}"
    most = 0
    if target.codec is None:
        # The likely count decides what fits, since the upstream enforces its own limit; the
        # reservation is for the most that the bytes can hold.
        most = min(most_tokens(counted_texts(request)), target.context_length)
    if media := _media_parts(request):
        most = max(most, len(ids)) + media * RESERVED_TOKENS
    return Prompt(request, ids, limit, headers, draft.order, most_tokens=most)


def _embedded(request: InferenceRequest, codec: TextCodec | None, context_length: int) -> Prompt:
    texts = read_texts(request, codec, context_length)
    ids = [token for each in texts.ids for token in each]
    parts = tuple(Prompt(texts.request, each, 1) for each in texts.ids if codec is not None)
    return Prompt(texts.request, ids, 1, parts=parts, most_tokens=texts.most)


def _media_parts(request: InferenceRequest) -> int:
    if not request.engine_parameters or CAPABILITIES.isdisjoint(request.engine_parameters):
        return 0
    contents = [message.get("content") for message in request.messages or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(part["type"] in KINDS for part in parts)


def _single_prompts(request: InferenceRequest) -> list[InferenceRequest]:
    """Each prompt has the whole context to itself."""
    return [replace(request, prompts=(each,)) for each in request.prompts]


def _joined(request: InferenceRequest, parts: list[Prompt]) -> Prompt:
    decoded_prompts = tuple(text for part in parts for text in part.request.decoded_prompts)
    ids = [token for part in parts for token in part.ids]
    request = replace(request, decoded_prompts=decoded_prompts)
    most = sum(part.most_tokens for part in parts)
    shortest = min(parts, key=lambda part: part.max_tokens)
    headers = {name: value for name, value in shortest.headers.items() if name == MAX_TOKENS_HEADER}
    limit = shortest.max_tokens
    return Prompt(request, ids, limit, headers, parts=tuple(parts), most_tokens=most)


def apply_prompt_order(
    request: InferenceRequest, principal: Principal
) -> tuple[InferenceRequest, str | None]:
    """Applies the tenant's `prompt_order` setting (`off`, `safe` or `full`). Returns the request and
    the order with its changes, for example `full:tools+volatile`; None for a prompt without messages.
    """
    order_setting = principal.settings.get("prompt_order", _SAFE)
    order = _ORDERS.get(order_setting)
    if request.messages is None or order is None:
        return request, None
    if order is not _FULL and not request.tools:
        return request, order.value
    if order is _SAFE and (tools := tool_list(principal.tenant_id, request.tools or ())):
        return replace(request, tools=tools), f"{order.value}:tools" if tools.moved else order.value
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


def _check_ids(ids: list[int], vocab_size: int) -> list[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"prompt contains the token id {token}, which is out of vocabulary: this model has "
                f"ids 0 to {vocab_size - 1}.",
                next_step="Use ids of this model's tokenizer; /tokenize returns them.",
                param="prompt",
            )
    return ids


def _output_limit(request: InferenceRequest, prompt_tokens: int, context_length: int) -> int:
    output_limit = context_length - prompt_tokens
    requested = request.max_tokens
    too_many = requested is not None and requested > output_limit
    if output_limit < 1 or (too_many and not request.clamp_max_tokens):
        raise _too_long(request, prompt_tokens, context_length)
    return requested if requested is not None and not too_many else output_limit


def _too_long(
    request: InferenceRequest, prompt_tokens: int, context_length: int
) -> ContextLengthExceeded:
    requested = request.max_tokens
    named = request.extra.get("named", {})
    most, prompt = named.get("max_tokens", "max_tokens"), _param_name(request)
    output = f" and {most} is {requested}" if requested is not None else ""
    return ContextLengthExceeded(
        f"The model's context is {context_length} tokens; the prompt has {prompt_tokens}{output}.",
        next_step=f"Shorten the prompt or {most}, or let truncation drop old turns.",
        param=named.get(prompt, prompt) if prompt_tokens >= context_length else most,
    ).counted(prompt_tokens, requested, context_length)


def _ids_without_tokenizer(param: str) -> BadRequest:
    return BadRequest(
        f"{param} has token ids, but this model's tokenizer is not known here, so they cannot be "
        "counted or screened.",
        next_step="Send text. An operator can name the model's tokenizer in TOLLHOUSE_UPSTREAMS.",
        param=param,
    )


def _param_name(request: InferenceRequest) -> str:
    return "messages" if request.messages is not None else "prompt"
