"""Limits as data: a rule has a scope, a unit, a limit and a period; a plan is a named set of rules.

A tenant's own rules are added to those of its plan, and replace those with the same scope, unit,
period and target.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

MINUTE, HOUR, DAY = 60, 3_600, 86_400
BATCH_PRIORITY = -1
KEY_OVERSHOOT_S = 15  # the longest wait of other keys for what one key generated unreserved


class Scope(StrEnum):
    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    MODEL = "model"  # per tenant
    LABEL = "label"  # per tenant; its rules have a target


class Unit(StrEnum):
    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    TOTAL_TOKENS = "total_tokens"
    CONCURRENT = "concurrent"  # without a period


@dataclass(frozen=True, slots=True)
class LimitRule:
    scope: Scope
    unit: Unit
    limit: int
    period_s: int = MINUTE
    # Project id, key id, model name, or a label such as team=search; empty: each one separately.
    target: str = ""
    shadow: bool = False  # count and report without rejecting
    # `tenant:requests:60`, as in headers, metrics and errors. Precomputed: every request reads it.
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        period = "" if self.unit is Unit.CONCURRENT else f":{self.period_s}"
        object.__setattr__(self, "name", f"{self.scope}:{self.unit}{period}")

    @property
    def slot(self) -> tuple[str, str, int, str]:
        period = 0 if self.unit is Unit.CONCURRENT else self.period_s
        return (self.scope, self.unit, period, self.target)


_PERIODS = {1: "a second", MINUTE: "a minute", HOUR: "an hour", DAY: "a day"}
_OF_OUTPUT = (Unit.OUTPUT_TOKENS, Unit.TOTAL_TOKENS)


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    rules: tuple[LimitRule, ...]
    priority: int  # 0 is rejected first when the gateway is saturated
    weight: int  # share of the queue and of the engine
    cached_permille: int = 1000  # weight of a cached input token in limits, per mille
    queue_wait_s: float = 0.0  # how long a request over a limit may wait; 0: reject at once
    queue_length: int = 0  # per tenant and gateway process
    expected_output: int = 256  # tokens, until the tenant's own average is known
    storage_mb: int = 10_240  # of all that the API stores for the tenant
    # The lowest limit that counts output tokens, if there is one. Precomputed, as the rules' names are.
    least_output_limit: int | None = field(init=False, compare=False)
    by_label: bool = field(init=False, compare=False)  # whether a rule is for a label
    # Output tokens by which the running requests of one key may exceed what they reserved together;
    # other keys wait until that is refilled. None without a limit that keys share.
    key_overshoot: int | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        counted = [r for r in self.rules if r.unit in _OF_OUTPUT and not r.shadow]
        least = min([r.limit for r in counted], default=None)
        shared = [
            r.limit * KEY_OVERSHOOT_S // r.period_s for r in counted if r.scope is not Scope.KEY
        ]
        object.__setattr__(self, "least_output_limit", least)
        object.__setattr__(self, "key_overshoot", min(shared, default=None))
        object.__setattr__(self, "by_label", any(r.scope is Scope.LABEL for r in self.rules))


def limit_in_words(unit: str, limit: int, period_s: int) -> str:
    """`256 at once`, `3,000 requests a minute`."""
    if unit == "concurrent":
        return f"{limit:,} at once"
    period = _PERIODS.get(period_s, f"in {period_s} s")
    words = unit.replace("_", " ")
    return f"{limit:,} {words.removesuffix('s') if limit == 1 else words} {period}"


def _rates(requests: int, tokens: int, concurrent: int) -> tuple[LimitRule, ...]:
    return (
        LimitRule(Scope.TENANT, Unit.REQUESTS, requests, MINUTE),
        LimitRule(Scope.TENANT, Unit.TOTAL_TOKENS, tokens, MINUTE),
        LimitRule(Scope.TENANT, Unit.CONCURRENT, concurrent),
    )


FREE = Plan(
    "free",
    (*_rates(20, 20_000, 2), LimitRule(Scope.TENANT, Unit.REQUESTS, 1_000, DAY)),
    priority=0,
    weight=1,
    storage_mb=512,
)
STANDARD = Plan(
    "standard",
    _rates(3_000, 3_000_000, 256),
    priority=1,
    weight=4,
    cached_permille=100,
)
PREMIUM = Plan(
    "premium",
    _rates(30_000, 30_000_000, 2_048),
    priority=2,
    weight=16,
    cached_permille=0,
    queue_wait_s=20.0,
    queue_length=1_000,
    storage_mb=102_400,
)
PLANS = {plan.name: plan for plan in (FREE, STANDARD, PREMIUM)}


@lru_cache(maxsize=4096)
def for_batches(plan: Plan) -> Plan:
    """The plan of batch lines: after all interactive requests, without the organisation's limits of
    a minute or an hour. Limits of a day, of a key and of concurrency hold, as do budgets."""
    rules = tuple(rule for rule in plan.rules if _holds_for_batches(rule))
    return replace(plan, rules=rules, priority=BATCH_PRIORITY, queue_wait_s=0.0, queue_length=0)


def _holds_for_batches(rule: LimitRule) -> bool:
    concurrent = rule.unit is Unit.CONCURRENT
    return concurrent or rule.scope == Scope.KEY or rule.period_s >= DAY


def with_rules(plan: Plan, rules: tuple[LimitRule, ...]) -> Plan:
    """The plan with a tenant's own rules."""
    if not rules:
        return plan
    merged = {rule.slot: rule for rule in plan.rules}
    merged.update({rule.slot: rule for rule in rules})
    return replace(plan, rules=tuple(merged.values()))
