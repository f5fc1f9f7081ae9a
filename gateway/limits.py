"""Limits and the budget hold: one atomic step before the work, one exact settlement after it."""

from dataclasses import dataclass, field

from core.clock import Clock
from core.counters import (
    PICO_PER_NANO,
    BucketState,
    Cap,
    Counters,
    Denial,
    Grant,
    Hold,
    Slot,
    Take,
    Wish,
    nano_ceil,
    nano_floor,
)
from core.errors import InsufficientQuota, RateLimited
from core.tenants.plans import LimitRule, Plan, Scope, Unit
from gateway.estimates import OutputEstimates

LEASE_MS = 30_000


@dataclass(frozen=True, slots=True)
class MoneyLimit:
    """A budget or a prepaid balance. The key names its period too: `budget_x:2026-11`."""

    key: str
    cap_units: int  # picounits that may be spent in all
    spent_units: int  # picounits that billing knows to be spent


@dataclass(frozen=True, slots=True)
class Ask:
    """What the door knows of a request before it runs."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    model: str
    plan: Plan  # with the tenant's own rules in it: `core.tenants.plans.with_rules`
    prompt_tokens: int
    max_output_tokens: int | None = None
    money: tuple[MoneyLimit, ...] = ()
    base_cost_units: int = (
        0  # picounits of the request and its prompt, uncached, at the pinned price
    )
    output_cost_units: int = 0  # picounits of one output token, the dearest tier
    choices: int = 1  # `n`: the output estimate is for all of them
    deadline_s: float | None = None  # seconds left, bounds the wait in a queue


@dataclass(frozen=True, slots=True)
class Counted:
    """What the request came to. `cost_units` is the exact charge in picounits."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_units: int = 0


@dataclass(slots=True)
class Reservation:
    """Held until it is settled or released. `covered_output_tokens` is how far the money reaches:
    deliver no token beyond it before `Limiter.extend` raised it. None: no money limit at all."""

    ask: Ask
    wish: Wish
    rules: tuple[LimitRule, ...]  # beside wish.takes
    amounts: list[int]
    grant: Grant
    covered_output_tokens: int | None
    held_units: int
    mode: str = "shared"  # or "local": counted by this process alone while Redis is down
    queued_ms: int = 0
    ended: bool = False
    shadow: tuple[str, ...] = field(default=())

    @property
    def buckets(self) -> tuple[BucketState, ...]:
        return self.grant.buckets


class Limiter:
    """Asks the counters. Every way out of a request ends in `settle` or `release`, once."""

    def __init__(self, counters: Counters, clock: Clock) -> None:
        self._counters = counters
        self._clock = clock
        self._estimates = OutputEstimates()

    async def reserve(self, ask: Ask) -> Reservation:
        """RateLimited with a true `retry_after_s`, or InsufficientQuota; nothing is then held."""
        estimate = self._estimate(ask)
        wish, rules = _wish_of(ask, estimate)
        answer = await self._counters.reserve(wish)
        if isinstance(answer, Denial):
            raise _refusal(ask, answer)
        held = answer.held * PICO_PER_NANO
        amounts = [take.amount for take in wish.takes]
        covered = _covered(ask, held)
        return Reservation(ask, wish, rules, amounts, answer, covered, held, shadow=answer.shadow)

    async def extend(self, reservation: Reservation, output_tokens: int) -> int:
        """Cover this many more output tokens, or as many as the money allows; 0 is the end of it.

        Returns how many more are covered. Rates are raised with them, into debt if it must be.
        """
        ask = reservation.ask
        if reservation.covered_output_tokens is None or ask.output_cost_units == 0:
            return output_tokens
        reach = reservation.covered_output_tokens + output_tokens
        amounts = _amounts(reservation.rules, ask.plan, Counted(ask.prompt_tokens, 0, reach))
        short = ask.base_cost_units + reach * ask.output_cost_units - reservation.held_units
        least = short - (output_tokens - 1) * ask.output_cost_units
        granted = await self._counters.extend(
            ask.tenant_id, reservation.wish.id, amounts, nano_ceil(least), nano_ceil(short)
        )
        reservation.held_units += granted * PICO_PER_NANO
        reservation.amounts = [max(pair) for pair in zip(reservation.amounts, amounts, strict=True)]
        before = reservation.covered_output_tokens
        covered = _covered(ask, reservation.held_units) or 0
        reservation.covered_output_tokens = min(reach, covered)
        return reservation.covered_output_tokens - before

    async def settle(self, reservation: Reservation, counted: Counted) -> None:
        """Return the difference of everything in one go. A second call does nothing."""
        if reservation.ended:
            return
        reservation.ended = True
        ask = reservation.ask
        each = counted.output_tokens // ask.choices
        self._estimates.learn(ask.tenant_id, ask.model, each, ask.plan.expected_output)
        amounts = _amounts(reservation.rules, ask.plan, counted)
        await self._counters.settle(
            ask.tenant_id, reservation.wish.id, amounts, nano_ceil(counted.cost_units)
        )

    async def release(self, reservation: Reservation) -> None:
        """The request never ran: give everything back."""
        if reservation.ended:
            return
        reservation.ended = True
        nothing = [0] * len(reservation.rules)
        await self._counters.settle(reservation.ask.tenant_id, reservation.wish.id, nothing, 0)

    def _estimate(self, ask: Ask) -> int:
        expected = self._estimates.expect(ask.tenant_id, ask.model, ask.plan.expected_output)
        capped = min(expected, ask.max_output_tokens or expected)
        return capped * ask.choices


def _wish_of(ask: Ask, estimate: int) -> tuple[Wish, tuple[LimitRule, ...]]:
    takes, slots, rules = [], [], []
    expected = Counted(ask.prompt_tokens, 0, estimate)
    for rule in ask.plan.rules:
        key = _key_of(rule, ask)
        if key is None:
            continue
        if rule.unit is Unit.CONCURRENT:
            slots.append(Slot(key, rule.limit, rule.shadow))
            continue
        keep = _amount(rule, ask.plan, Counted(ask.prompt_tokens, 0, 0))
        amount = _amount(rule, ask.plan, expected)
        # An estimate above the whole limit is cut to it: only the prompt may make a request too big.
        amount = max(keep, min(amount, rule.limit))
        takes.append(Take(key, rule.limit, rule.period_s * 1000, amount, keep, rule.shadow))
        rules.append(rule)
    hold = _hold_of(ask, estimate) if ask.money else None
    wish = Wish(ask.tenant_id, ask.request_id, LEASE_MS, tuple(takes), tuple(slots), hold)
    return wish, tuple(rules)


def _hold_of(ask: Ask, estimate: int) -> Hold:
    """The prompt and one output token must be paid for; the estimate is wanted."""
    need = ask.base_cost_units + ask.output_cost_units
    want = ask.base_cost_units + max(1, estimate) * ask.output_cost_units
    caps = tuple(
        Cap(limit.key, nano_floor(limit.cap_units), nano_ceil(limit.spent_units))
        for limit in ask.money
    )
    return Hold(nano_ceil(need), nano_ceil(want), caps)


def _covered(ask: Ask, held_units: int) -> int | None:
    if not ask.money or ask.output_cost_units == 0:
        return None
    return max(0, held_units - ask.base_cost_units) // ask.output_cost_units


def _key_of(rule: LimitRule, ask: Ask) -> str | None:
    owner = {
        Scope.TENANT: ask.tenant_id,
        Scope.PROJECT: ask.project_id,
        Scope.KEY: ask.key_id,
        Scope.MODEL: ask.model,
    }[rule.scope]
    if rule.target and rule.target != owner:
        return None
    return f"{rule.name}:{owner}"


def _amounts(rules: tuple[LimitRule, ...], plan: Plan, counted: Counted) -> list[int]:
    return [_amount(rule, plan, counted) for rule in rules]


def _amount(rule: LimitRule, plan: Plan, counted: Counted) -> int:
    """Cached tokens weigh less by plan, rounded up to a whole token once a request."""
    weighed = counted.prompt_tokens - counted.cached_tokens
    weighed += -(-counted.cached_tokens * plan.cached_permille // 1000)
    match rule.unit:
        case Unit.REQUESTS:
            return 1
        case Unit.INPUT_TOKENS:
            return weighed
        case Unit.OUTPUT_TOKENS:
            return counted.output_tokens
        case _:
            return weighed + counted.output_tokens


def _refusal(ask: Ask, denial: Denial) -> RateLimited | InsufficientQuota:
    if denial.money:
        return InsufficientQuota(
            "The budget or prepaid balance does not cover this request.",
            next_step="Raise the budget or top up the balance, then try again.",
        )
    names = ", ".join(key.rpartition(":")[0] for key in denial.keys)
    wait = denial.wait_ms
    return RateLimited(
        f"Limit reached: {names}.",
        next_step="Wait as retry-after says." if wait else "Wait until running requests end.",
        retry_after_s=wait / 1000 if wait else 1.0,
    )
