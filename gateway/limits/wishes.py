"""Converts a request and its plan to a `BucketRequest` for the counters, without I/O."""

from dataclasses import dataclass

from msgspec import Struct

from core.counters import Cap, Hold, Slot, Take, Wish, nano_ceil, nano_floor
from core.tenants.plans import LimitRule, Plan, Scope, Unit

LEASE_MS = 30_000


class MoneyLimit(Struct, frozen=True):
    """A budget or a prepaid balance. The key names its period too: `budget_x:2026-11`."""

    key: str
    cap_units: int  # picounits that may be spent in total
    spent_units: int  # picounits that billing has recorded as spent


class Ask(Struct, frozen=True):
    """The size and owner of a request before it runs."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    model: str
    plan: Plan  # with the tenant's own rules in it: `core.tenants.plans.with_rules`
    prompt_tokens: int
    max_output_tokens: int | None = None  # of one choice
    money: tuple[MoneyLimit, ...] = ()
    base_cost_units: int = 0  # picounits of request and uncached prompt, at the pinned price
    output_cost_units: int = 0  # picounits of one output token, in the most expensive tier
    choices: int = 1  # the output estimate covers all of them
    deadline_s: float | None = None  # seconds left, which bound the wait in a queue


class Counted(Struct, frozen=True):
    """Token counts of a finished request. `cost_units` is the exact charge in picounits."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_units: int = 0


class Wished(Struct, frozen=True):
    wish: Wish
    rules: tuple[LimitRule, ...]  # parallel to wish.takes


@dataclass(frozen=True, slots=True)
class _Layout:
    """The buckets and slots of a plan for one key and model, independent of the request."""

    plan: Plan
    rules: tuple[LimitRule, ...]  # those with buckets
    takes: tuple[Take, ...]  # parallel to `rules`, of one unit each
    slots: tuple[Slot, ...]
    # Takes whose amount depends on the request: index, unit, key, capacity, period in ms, shadow.
    counting: tuple[tuple[int, Unit, str, int, int, bool], ...]


_layouts: dict[tuple[str, str, str, str, int], _Layout] = {}
_LAYOUTS_KEPT = 20_000


def wish_of(ask: Ask, output_estimate: int, *, shares: int = 1) -> Wished:
    """`shares` divides every limit by the number of processes that grant it independently."""
    layout = _layout_of(ask, shares)
    takes = list(layout.takes)
    if layout.counting:
        expected = _by_unit(ask.plan, Counted(ask.prompt_tokens, 0, output_estimate))
        alone = _by_unit(ask.plan, Counted(ask.prompt_tokens, 0, 0))
        for place, unit, key, limit, period_ms, shadow in layout.counting:
            keep, wanted = alone[unit], expected[unit]
            # An estimate above the limit is cut to it: only the prompt makes a request too large.
            wanted = max(keep, min(wanted, limit))
            takes[place] = Take(key, limit, period_ms, wanted, keep, shadow)
    hold = _hold_of(ask, output_estimate) if ask.money else None
    wish = Wish(ask.tenant_id, ask.request_id, LEASE_MS, tuple(takes), layout.slots, hold)
    return Wished(wish, layout.rules)


def _layout_of(ask: Ask, shares: int) -> _Layout:
    owner = (ask.tenant_id, ask.project_id, ask.key_id, ask.model, shares)
    known = _layouts.get(owner)
    if known is not None and known.plan is ask.plan:
        return known
    if len(_layouts) >= _LAYOUTS_KEPT:
        _layouts.clear()
    made = _layouts[owner] = _lay_out(ask, shares)
    return made


def _lay_out(ask: Ask, shares: int) -> _Layout:
    takes, slots, rules = [], [], []
    owners = {
        Scope.TENANT: ask.tenant_id,
        Scope.PROJECT: ask.project_id,
        Scope.KEY: ask.key_id,
        Scope.MODEL: ask.model,
    }
    for rule in ask.plan.rules:
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
        (place, rule.unit, take.key, take.capacity, take.period_ms, take.shadow)
        for place, (rule, take) in enumerate(zip(rules, takes, strict=True))
        if rule.unit is not Unit.REQUESTS
    )
    return _Layout(ask.plan, tuple(rules), tuple(takes), tuple(slots), counting)


def covered_by(ask: Ask, held_units: int) -> int | None:
    """Output tokens that the held money pays for; None without a money limit."""
    if not ask.money or ask.output_cost_units == 0:
        return None
    return max(0, held_units - ask.base_cost_units) // ask.output_cost_units


def amounts(rules: tuple[LimitRule, ...], plan: Plan, counted: Counted) -> list[int]:
    """The amount for each rule's bucket, in the order of `rules`."""
    by_unit = _by_unit(plan, counted)
    return [by_unit[rule.unit] for rule in rules]


def _by_unit(plan: Plan, counted: Counted) -> dict[Unit, int]:
    """Amounts per unit. The plan weights cached tokens, rounded up to a whole token per request."""
    weighed = counted.prompt_tokens - counted.cached_tokens
    weighed += -(-counted.cached_tokens * plan.cached_permille // 1000)
    return {
        Unit.REQUESTS: 1,
        Unit.INPUT_TOKENS: weighed,
        Unit.OUTPUT_TOKENS: counted.output_tokens,
        Unit.TOTAL_TOKENS: weighed + counted.output_tokens,
    }


def _hold_of(ask: Ask, estimate: int) -> Hold:
    """The hold needs the prompt and one output token, and asks for the whole estimate."""
    need = ask.base_cost_units + ask.output_cost_units
    want = ask.base_cost_units + max(1, estimate) * ask.output_cost_units
    caps = tuple(
        Cap(limit.key, nano_floor(limit.cap_units), nano_ceil(limit.spent_units))
        for limit in ask.money
    )
    return Hold(nano_ceil(need), nano_ceil(want), caps)
