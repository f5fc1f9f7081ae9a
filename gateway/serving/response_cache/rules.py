"""Whether a request may be answered from the response cache, and under which key."""

import hashlib
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from core.errors import BadRequest
from core.tenants.response_cache import ERASED, MAX_TTL_S, CacheRule
from gateway.request.inference import InferenceRequest
from gateway.serving.cached_answers import Lookup

if TYPE_CHECKING:
    from gateway.serving.cached_answers import AnswerStore
    from gateway.serving.context import RequestContext

HEADER = b"x-tollhouse-cache"
_DEFAULT_TEMPERATURE = 1.0


def lookup_of(ctx: "RequestContext", store: "AnswerStore") -> Lookup:
    """By the tenant's rule and the request's header, which may change each part of it. Raises
    BadRequest for a header that is not understood."""
    lookup = Lookup(ctx.principal.cache_rule, store)
    given = ctx.exchange.header(HEADER)
    for each in given.split(",") if given is not None else ():
        word, _, value = each.strip().lower().partition("=")
        if word == "off" and not value:
            lookup.rule = None
            break
        rule = lookup.rule or CacheRule()
        if word == "ttl" and value.isascii() and value.isdecimal() and len(value) < 9:
            if not 1 <= int(value) <= MAX_TTL_S:
                raise _wrong(each)
            rule = replace(rule, ttl_s=int(value))
        elif word == "refresh" and not value:
            lookup.refresh = True
        elif word in ("sampled", "tools") and not value:
            rule = replace(rule, **{word: True})
        elif word != "on" or value:
            raise _wrong(each)
        lookup.rule = rule
    return lookup


def find_key(ctx: "RequestContext", lookup: Lookup) -> None:
    """Sets the key of the screened request, or notes why it is not cached."""
    assert lookup.rule is not None
    request = ctx.prompt.request
    why = _why_not(ctx, lookup.rule)
    if why:
        lookup.note = f"bypass; reason={why}"
        return
    adapter = ctx.target.adapter
    lookup.epoch = str(ctx.principal.settings.get(ERASED, ""))
    parts = (
        ctx.principal.tenant_id,
        lookup.epoch,
        ctx.target.model.name,
        adapter.digest if adapter is not None else "",
        _alike(request),
    )
    try:
        encoded = msgspec.msgpack.encode(parts, order="deterministic")
    except (TypeError, ValueError, OverflowError, RecursionError):
        lookup.note = "bypass; reason=values"
        return
    lookup.key = hashlib.blake2b(encoded, digest_size=32).digest()
    lookup.note = "refresh" if lookup.refresh else "miss"


def _why_not(ctx: "RequestContext", rule: CacheRule) -> str:
    request = ctx.prompt.request
    if request.inputs is not None:
        return "embeddings"
    if len(request.prompts) > 1:
        return "prompts"
    if request.prompt_logprobs is not None:
        return "prompt_logprobs"
    if request.tools and not rule.tools:
        return "tools"
    if ctx.options.is_warm_up:
        return "warm_up"
    temperature = request.temperature
    if temperature is None:
        temperature = ctx.target.model.defaults.get("temperature", _DEFAULT_TEMPERATURE)
    return "temperature" if temperature > 0 and not rule.sampled else ""


def _alike(request: InferenceRequest) -> InferenceRequest:
    """The request without what does not change its answer."""
    return replace(
        request,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        end_user=None,
        client_request_id=None,
        timeout_s=None,
        service_tier=None,
        prediction=None,
    )


def _wrong(given: str) -> BadRequest:
    return BadRequest(
        f"x-tollhouse-cache is {given[:80]!r}; it must be off, or a list of on, refresh, sampled, "
        f"tools and ttl=<1 to {MAX_TTL_S} seconds>.",
        next_step="Write it like x-tollhouse-cache: ttl=600.",
        param="x-tollhouse-cache",
        code="invalid_value",
    )
