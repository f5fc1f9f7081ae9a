"""The models of a request: its canary, and fallbacks for when no replica of a model can answer. The
operator sets chains; a tenant may override them or turn them off (`fallback` in its settings: "off",
or {"model": ["next", …]}), and a key those of its tenant. `canary` gives other models a share of a
model's conversations.

The usage event names the model that answered, and its price applies.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from core import labels, metrics
from core.errors import BadRequest, SettingError, TollhouseError
from core.tenants.key_routing import CANARY, FALLBACK, OFF
from core.tenants.keys import Principal
from gateway.catalog.catalog import Catalog, Target
from gateway.catalog.virtual_models import Facts, VirtualModel
from gateway.engines.routing.canaries import point_of
from gateway.request.exchange import Exchange
from gateway.request.inference import InferenceRequest

log = logging.getLogger("tollhouse.pipeline")
HEADER = "x-tollhouse-fallback"
VIRTUAL_HEADER = "x-tollhouse-virtual-model"
_LABELS = labels.HEADER.encode()
_CHARACTERS = 4  # of a prompt's text, for one token
_USUAL_OUTPUT = 256  # tokens of an answer without a bound, for comparing costs
# The most that a request may cost: of whom, at which model, prompt and output tokens.
Cost = Callable[[Principal, str, int, int], int | None]
CANARY_HEADER = "x-tollhouse-canary"


class TryFallback(Exception):
    """No replica of the model produced output, and another model may answer."""

    def __init__(self, error: TollhouseError) -> None:
        super().__init__(error.message)
        self.error = error


class Chain(Protocol):
    """What a request's context holds of its models."""

    target: Target
    fallbacks: list[Target]  # to try if the target fails
    fallback_from: list[str]  # models that failed before it


class Chosen(Chain, Protocol):
    """What the first choice reads of a request, and the canary that it may set."""

    canary_of: str
    virtual: str

    @property
    def principal(self) -> Principal: ...

    @property
    def request(self) -> InferenceRequest: ...

    @property
    def exchange(self) -> Exchange: ...


def fall_back(ctx: Chain, failure: TryFallback) -> None:
    """Go on with the next model of the chain."""
    failed = ctx.target.model.name
    ctx.fallback_from.append(failed)
    ctx.target = ctx.fallbacks.pop(0)
    log.warning("falling back to %s: %s", ctx.target.model.name, failure.error.message)
    metrics.fallbacks.labels(failed, ctx.target.model.name).inc()


def fallback_headers(ctx: Chain) -> list[tuple[bytes, bytes]]:
    """The chain up to the model that answers; empty when the first one does."""
    if not ctx.fallback_from:
        return []
    chain = " -> ".join([*ctx.fallback_from, ctx.target.model.name])
    return [(HEADER.encode(), chain.encode("ascii", "replace"))]


def _facts_of(ctx: Chosen) -> Facts:
    principal, request = ctx.principal, ctx.request
    named = dict(request.metadata or {})
    if (header := ctx.exchange.header(_LABELS)) is not None:
        named |= labels.parse_header(header)
    tokens, images = 0, False
    for message in request.messages or ():
        content = message.get("content")
        if isinstance(content, list):
            images |= any("image" in str(part.get("type")) for part in content)
            texts = [str(part.get("text") or "") for part in content]
        else:
            texts = [str(content or "")]
        tokens += sum(map(len, texts)) // _CHARACTERS
    for prompt in (*request.prompts, *(request.inputs or ())):
        tokens += len(prompt) // _CHARACTERS if isinstance(prompt, str) else len(prompt)
    return Facts(
        frozenset((principal.tenant_id, principal.tenant_name)),
        frozenset(f"{k}={v}" for k, v in named.items() if k in principal.label_keys),
        tokens,
        bool(request.tools),
        images,
    )


class Fallbacks:
    def __init__(
        self, catalog: Catalog, chains: Mapping[str, tuple[str, ...]], cost: Cost | None = None
    ) -> None:
        """`cost` is what a request would cost at most, of a virtual model's pool."""
        self._catalog = catalog
        self._chains = chains
        self._cost = cost

    def choose(self, ctx: Chosen, target: Target) -> None:
        """Set the target and its fallbacks. Of a canary, the model itself is the first one."""
        principal = ctx.principal
        if target.virtual is not None:
            ctx.virtual = target.public_name
            ctx.target, *ctx.fallbacks = self._of_pool(ctx, target.virtual)
            return
        ctx.target, ctx.fallbacks = target, self.after(principal, target)
        if CANARY not in principal.settings or target.adapter is not None:
            return
        chosen = self._canary(principal, target, ctx.request)
        if chosen is not None:
            others = [each for each in ctx.fallbacks if each.model is not chosen.model]
            ctx.canary_of = target.model.name
            ctx.target, ctx.fallbacks = chosen, [target, *others]

    def _of_pool(self, ctx: Chosen, virtual: VirtualModel) -> list[Target]:
        """The models of its pool for this request, the chosen one first, of those that the key may
        use. BadRequest if no condition holds."""
        principal, request = ctx.principal, ctx.request
        facts = _facts_of(ctx)
        opening = request.prompts[0] if request.prompts else str(request.inputs)[:1_000]
        ids = list(opening[:1_000]) if not isinstance(opening, str) else [opening[:1_000]]
        point = point_of(f"{principal.tenant_id}\0{virtual.name}", request.messages, ids)

        def _cost(model: str) -> int | None:
            if self._cost is None:
                return None
            return self._cost(principal, model, facts.tokens, request.max_tokens or _USUAL_OUTPUT)

        ranked = virtual.ranked(facts, point, _cost)
        found = [self._allowed(principal, name) for name in ranked]
        targets = [
            Target(virtual.name, each.model) for each in found if each and each.adapter is None
        ]
        if not targets:
            raise BadRequest(
                f"No model of {virtual.name} takes this request: the conditions of its pool do not hold.",
                next_step="Name a model itself; GET /v1/models lists them.",
                param="model",
            )
        if principal.settings and principal.settings.get(FALLBACK) == OFF:
            return targets[:1]
        return targets

    def _canary(
        self, principal: Principal, target: Target, request: InferenceRequest
    ) -> Target | None:
        """The model that gets this conversation, if the key may use it; None for the model itself."""
        name = target.model.name
        shares = principal.settings[CANARY].get(name)
        if not shares:
            return None
        opening = request.prompts[0] if request.prompts else str(request.inputs)[:1_000]
        ids = list(opening[:1_000]) if not isinstance(opening, str) else [opening[:1_000]]
        point, below = point_of(f"{principal.tenant_id}\0{name}", request.messages, ids), 0
        for other, percent in shares.items():
            below += percent
            if point < below:
                return self._allowed(principal, other)
        return None

    def _allowed(self, principal: Principal, name: str) -> Target | None:
        try:
            return self._catalog.resolve(principal, name)
        except TollhouseError:
            return None

    def after(self, principal: Principal, target: Target) -> list[Target]:
        """The fallbacks that this key may use, in order. Adapters have none, since they need their
        base model."""
        override = principal.settings.get(FALLBACK) if principal.settings else None
        if target.adapter is not None or override == OFF or not (self._chains or override):
            return []
        chains: Mapping[str, Any] = override if isinstance(override, dict) else self._chains
        listed = chains.get(target.model.name) or ()
        found = []
        for name in listed if isinstance(listed, list | tuple) else ():
            after = self._allowed(principal, str(name))
            if after is not None and after.adapter is None and after.model is not target.model:
                found.append(after)
        return found


def read_fallbacks(setting: str) -> dict[str, tuple[str, ...]]:
    """Parse `small=large,other; large=other`, or a JSON object of lists."""
    text = setting.strip()
    if text.startswith("{"):
        try:
            given = json.loads(text)
            return {str(name): tuple(map(str, after)) for name, after in given.items()}
        except (ValueError, TypeError) as error:
            raise _invalid(f"it is not a JSON object of lists: {error}") from None
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, equals, after = part.partition("=")
        names = tuple(filter(None, (each.strip() for each in after.split(","))))
        if not equals or not name.strip() or not names:
            raise _invalid(f"{part!r} is not model=next,next")
        found[name.strip()] = names
    return found


def _invalid(problem: str) -> SettingError:
    return SettingError(
        f"TOLLHOUSE_FALLBACKS is invalid: {problem}.",
        next_step="Write it like small=large,other; large=other.",
    )
