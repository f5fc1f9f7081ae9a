"""A reservation of limits and money, held from the admission of a request until its settlement, and
its size: `plan_buckets` converts a request and its plan to a `BucketRequest`, without I/O.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from billing.pricing.pricing import PriceVersion
from core.counters import (
    BucketGrant,
    BucketRequest,
    BucketState,
    Cap,
    Counters,
    Hold,
    Slot,
    Take,
    nano_ceil,
    nano_floor,
)
from core.errors import TollhouseError
from core.events import UsageEvent
from core.labels import has as has_label
from core.tenants.plans import LimitRule, Plan, Scope, Unit
from gateway.admission.request import (
    UNUSED,
    AdmissionRequest,
    LimitState,
    MoneyLimit,
    SettledUsage,
)

log = logging.getLogger("tollhouse.admission")
LEASE_MS = 30_000
NO_LIMIT = 1 << 60
_EXTEND_TOKENS = 64  # output tokens by which a money hold is extended
_MAX_LAYOUTS = 20_000
_MAX_SIZES = 4_096  # at most 3 MB
_REQUESTS, _INPUT, _OUTPUT, _TOTAL = (
    *(Unit.REQUESTS, Unit.INPUT_TOKENS, Unit.OUTPUT_TOKENS, Unit.TOTAL_TOKENS),
)


_unit_of = attrgetter("unit")


class PlannedBuckets(Struct, frozen=True):
    bucket_request: BucketRequest
    rules: tuple[LimitRule, ...]  # parallel to `bucket_request.takes`


class Settler(Protocol):
    """The part of the limiter that a reservation uses after the admission."""

    async def extend(self, reservation: "Reservation", output_tokens: int) -> int: ...

    def keep(self, reservation: "Reservation") -> None: ...

    async def settle(self, reservation: "Reservation", usage: SettledUsage) -> None: ...


class Reservation(Struct, eq=False):
    """`covered` is how many output tokens the held money pays for; deliver none beyond it before
    `extend`."""

    request: AdmissionRequest
    planned: PlannedBuckets
    grant: BucketGrant
    counters: Counters
    settler: Settler
    covered: int  # NO_LIMIT without a money limit
    held_units: int  # picounits
    mode: str = "shared"  # or "local": counted in this process while Redis is down
    queued_ms: int = 0
    beyond: int = 0  # output tokens that it may generate beyond those reserved
    ended: bool = False
    kept: bool = False  # its record is durable, so its money outlives its lease
    price: PriceVersion | None = None  # pinned for the request

    @property
    def bucket_request(self) -> BucketRequest:
        return self.planned.bucket_request

    @property
    def price_version(self) -> str:
        return self.price.id if self.price is not None else ""

    @property
    def buckets(self) -> tuple[BucketState, ...]:
        return self.grant.buckets

    @property
    def shadow(self) -> tuple[str, ...]:
        """Keys of the shadow limits that would have refused this request."""
        return self.grant.shadow

    def limits(self) -> LimitState:
        grant = self.grant
        return LimitState(
            grant.takes,
            grant.remaining,
            grant.reset_ms,
            self.mode,
            self.queued_ms,
            grant.shadow,
        )

    async def extend(self, output_tokens: int) -> bool:
        """Cover at least `output_tokens` in total; False when the money does not suffice. Raises
        DependencyDown when the counters do not answer."""
        await self.settler.extend(self, max(_EXTEND_TOKENS, output_tokens - self.covered))
        return self.covered >= output_tokens

    def keep(self) -> None:
        """Call it when the request's opened record is durable: its money then outlives its lease, since
        the request will be settled even if this process dies."""
        self.settler.keep(self)

    async def settle(self, event: UsageEvent | None) -> None:
        """Keep what the ledger charges for the event, and return the rest. Without an event nothing
        is charged. Only the first call counts. Never raises."""
        usage = UNUSED
        if event is not None:
            usage = SettledUsage.of_event(event, self.price if self.request.money else None)
            if self.request.candidates > self.request.choices and usage.requests:
                usage = replace(usage, withheld_tokens=event.waived_tokens)
        try:
            await self.settler.settle(self, usage)
        except TollhouseError as error:
            log.warning("a reservation was not settled and will expire: %s", error.message)


@dataclass(slots=True, eq=False)
class _Layout:
    """The buckets and slots of a plan for one key and model, independent of the request."""

    plan: Plan
    rules: tuple[LimitRule, ...]  # those with buckets
    takes: tuple[Take, ...]  # parallel to `rules`, of one unit each
    slots: tuple[Slot, ...]
    # Takes whose amount depends on the request: index, unit, key, capacity, period in ms, shadow.
    counting: tuple[tuple[int, Unit, str, int, int, bool], ...]
    money: tuple[MoneyLimit, ...] = ()  # of the last request
    caps: tuple[Cap, ...] = ()  # of `money`

    def takes_of(self, prompt_tokens: int, output_estimate: int) -> tuple[Take, ...]:
        if not self.counting:
            return self.takes
        size = (self, prompt_tokens, output_estimate)
        known = _sized.get(size)
        if known is None:
            if len(_sized) >= _MAX_SIZES:
                _sized.clear()
            known = _sized[size] = self._takes_of(prompt_tokens, output_estimate)
        return known

    def _takes_of(self, prompt_tokens: int, output_estimate: int) -> tuple[Take, ...]:
        takes = list(self.takes)
        usage = SettledUsage(prompt_tokens, 0, output_estimate)
        expected = _amounts_by_unit(self.plan, usage)
        alone = _amounts_by_unit(self.plan, SettledUsage(prompt_tokens, 0, 0))
        for index, unit, key, limit, period_ms, shadow in self.counting:
            minimum, amount = alone[unit], expected[unit]
            # An estimate above the limit is cut to it: only the prompt makes a request too large.
            amount = max(minimum, min(amount, limit))
            takes[index] = Take(key, limit, period_ms, amount, minimum, shadow)
        return tuple(takes)

    def caps_of(self, money: tuple[MoneyLimit, ...]) -> tuple[Cap, ...]:
        if money is not self.money:
            self.money, self.caps = money, caps_of(money)
        return self.caps


# By owner, shares, and the number of rules: a plan reduced to its limits on requests is another one.
_layouts: dict[tuple[str, str, str, str, int, int, str | None], _Layout] = {}
# The takes of requests of one size (prompt, estimate), which hardly vary within a key.
_sized: dict[tuple[_Layout, int, int], tuple[Take, ...]] = {}


def plan_buckets(
    request: AdmissionRequest, output_estimate: int, *, shares: int = 1, seeds: bool = True
) -> PlannedBuckets:
    """`shares` divides every limit by the number of processes that grant it independently. `seeds`:
    the hold may start a money account that the counters do not know."""
    layout = _get_layout(request, shares)
    takes = layout.takes_of(request.prompt_tokens, output_estimate)
    hold = None
    if request.money:
        caps = layout.caps_of(request.money)
        hold = _build_hold(request, output_estimate, caps, seeds=seeds)
    slots = layout.slots
    if request.generated_choices > 1:  # as many requests, or as all that the limit has
        slots = tuple([replace(s, count=min(request.generated_choices, s.limit)) for s in slots])
    bucket_request = BucketRequest(
        request.tenant_id, request.request_id, LEASE_MS, takes, slots, hold
    )
    return PlannedBuckets(bucket_request, layout.rules)


def _get_layout(request: AdmissionRequest, shares: int) -> _Layout:
    plan = request.plan
    owner = (
        *(request.tenant_id, request.project_id, request.key_id, request.model),
        shares,
        len(plan.rules),
        request.labels if plan.by_label else None,
    )
    known = _layouts.get(owner)
    if known is not None and known.plan is plan:
        return known
    if len(_layouts) >= _MAX_LAYOUTS:
        _layouts.clear()
    layout = _layouts[owner] = _build_layout(request, shares)
    return layout


def _build_layout(request: AdmissionRequest, shares: int) -> _Layout:
    takes, slots, rules = [], [], []
    owners = {
        Scope.TENANT: request.tenant_id,
        Scope.PROJECT: request.project_id,
        Scope.KEY: request.key_id,
        Scope.MODEL: request.model,
    }
    for rule in request.plan.rules:
        if rule.scope is Scope.LABEL:
            if not has_label(request.labels, rule.target):
                continue
            owner = rule.target.replace(":", "%3A")  # names of limits end at the last colon
        else:
            owner = owners[rule.scope]
            if rule.target and rule.target != owner:
                continue
        key, limit = f"{rule.name}:{owner}", rule.limit
        if shares > 1:
            limit = max(1, limit // shares)
        if rule.unit is Unit.CONCURRENT:
            slots.append(Slot(key, limit, rule.shadow))
            continue
        takes.append(Take(key, limit, rule.period_s * 1000, 1, 1, rule.shadow))
        rules.append(rule)
    counting = tuple(
        (index, rule.unit, take.key, take.capacity, take.period_ms, take.shadow)
        for index, (rule, take) in enumerate(zip(rules, takes, strict=True))
        if rule.unit is not Unit.REQUESTS
    )
    return _Layout(request.plan, tuple(rules), tuple(takes), tuple(slots), counting)


def output_tokens_covered(request: AdmissionRequest, held_units: int) -> int:
    """Output tokens that the held money pays for; NO_LIMIT without a money limit."""
    if not request.money or request.output_cost_units == 0:
        return NO_LIMIT
    left = held_units - request.base_cost_units
    return left // request.output_cost_units if left > 0 else 0


def bucket_amounts(rules: tuple[LimitRule, ...], plan: Plan, usage: SettledUsage) -> list[int]:
    """The amount for each rule's bucket, in the order of `rules`."""
    by_unit = _amounts_by_unit(plan, usage)
    return list(map(by_unit.__getitem__, map(_unit_of, rules)))


def _amounts_by_unit(plan: Plan, usage: SettledUsage) -> dict[Unit, int]:
    """Amounts per unit. The plan weights cached tokens, rounded up to a whole token per request."""
    weighted = usage.input_tokens - usage.cached_tokens
    weighted += -(-usage.cached_tokens * plan.cached_permille // 1000)
    return {
        _REQUESTS: usage.requests,
        _INPUT: weighted,
        _OUTPUT: usage.output_tokens + usage.withheld_tokens,
        _TOTAL: weighted + usage.output_tokens + usage.withheld_tokens,
    }


def _build_hold(
    request: AdmissionRequest, estimate: int, caps: tuple[Cap, ...], *, seeds: bool
) -> Hold:
    """The hold needs the prompt and the whole estimate: an answer that the money would cut is refused
    before an engine computes it."""
    need = nano_ceil(request.base_cost_units + (estimate or 1) * request.output_cost_units)
    return Hold(need, need, caps, seeds)


def caps_of(limits: Iterable[MoneyLimit]) -> tuple[Cap, ...]:
    return tuple(
        Cap(limit.key, nano_floor(limit.cap_units), nano_ceil(limit.spent_units))
        for limit in limits
    )
