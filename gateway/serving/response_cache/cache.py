"""The response cache: finds a request's answer, and keeps answers that may be given again."""

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from core import metrics
from core.clock import Clock
from core.database import Database
from core.errors import BadRequest
from core.tenants.key_cache import KeyCache
from core.tenants.models import Tenant
from core.tenants.response_cache import ERASED, MAX_TTL_S, CacheRule
from gateway.admission.limiter import Admission
from gateway.edge.refresh import POLL_S
from gateway.edge.threads import Work, run_as
from gateway.request.inference import InferenceRequest
from gateway.serving.cached_answers import AnswerStore, Lookup

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
        metadata=None,
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


log = logging.getLogger("tollhouse.response_cache")
_SWEEP_S = 30.0


class ResponseCache:
    def __init__(
        self, admission: Admission, clock: Clock, database: Database, keys: KeyCache, max_bytes: int
    ) -> None:
        """`max_bytes` 0: nothing is cached."""
        self.store = AnswerStore(max_bytes)
        self._admission = admission
        self._clock = clock
        self._database = database
        self._key_cache = keys

    def begin(self, ctx: "RequestContext") -> Lookup | None:
        """None for a request that does not use the cache. Raises BadRequest for a header that is not
        understood."""
        if ctx.principal.cache_rule is None and HEADER not in ctx.exchange.headers:
            return None
        return lookup_of(ctx, self.store)

    def find(self, ctx: "RequestContext", lookup: Lookup) -> bool:
        """Whether an answer is found, after admission and screening. Its price is pinned then."""
        assert ctx.reservation is not None
        if lookup.rule is None or ctx.fallback_from:
            return False
        if not self.store.max_bytes:
            lookup.note = "bypass; reason=disabled"
            return False
        find_key(ctx, lookup)
        found = None
        lookup.at = now = self._clock.monotonic()
        if lookup.key is not None and not lookup.refresh:
            found = self.store.get(ctx.principal.tenant_id, lookup.key, now)
        if found is not None and self._admission.reprice_cached(ctx.reservation):
            lookup.hit = found
            age, left = round(now - found.stored_s), max(0, round(found.expires_s - now))
            lookup.note = f"hit; age={age}; ttl={left}"
            lookup.source = f"response cache: answer of {found.request_id}, {age} s old"
        metrics.response_cache.labels(lookup.note.partition(";")[0]).inc()
        return lookup.hit is not None

    async def run(self) -> None:
        """Drops expired and erased answers, until cancelled."""
        read, swept = self._key_cache.epoch, self._clock.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            now, epoch = self._clock.monotonic(), self._key_cache.epoch
            if now - swept > _SWEEP_S:
                swept = now
                self.store.drop_expired(now)
            if epoch != read:
                try:
                    await self._drop_erased()
                    read = epoch
                except SQLAlchemyError as error:
                    log.warning("erased answers are not dropped yet: %s", error)

    async def _drop_erased(self) -> None:
        """Drop what tenants have erased, and the answers of tenants that are closed."""
        tenants = self.store.tenants
        if tenants:
            epochs = await run_as(Work.OWN, self._epochs, tenants)
            for tenant_id in tenants:
                self.store.drop(tenant_id, epochs.get(tenant_id))

    def _epochs(self, tenants: list[str]) -> dict[str, str]:
        query = select(Tenant.id, Tenant.settings).where(
            Tenant.id.in_(tenants), Tenant.status != "closed"
        )
        with self._database.read() as session:
            return {row[0]: str(row[1].get(ERASED, "")) for row in session.execute(query)}
