"""Limits as data: a rule says how much of what, for whom and per which time; a plan is a named set.

Rules of a tenant are added to those of its plan; one on the same scope, unit and period replaces
the plan's.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

MINUTE, HOUR, DAY = 60, 3_600, 86_400
BATCH_PRIORITY = -1


class Scope(StrEnum):
    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    MODEL = "model"  # of one tenant


class Unit(StrEnum):
    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    TOTAL_TOKENS = "total_tokens"
    CONCURRENT = "concurrent"  # has no period


@dataclass(frozen=True, slots=True)
class LimitRule:
    scope: Scope
    unit: Unit
    limit: int
    period_s: int = MINUTE
    target: str = ""  # id of the project or key, name of the model; empty is each one for itself
    shadow: bool = False  # count and report, refuse nothing
    # `tenant:requests:60`: what headers, metrics and errors call it. Made once, read every request.
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        period = "" if self.unit is Unit.CONCURRENT else f":{self.period_s}"
        object.__setattr__(self, "name", f"{self.scope}:{self.unit}{period}")

    @property
    def slot(self) -> tuple[str, str, int, str]:
        period = 0 if self.unit is Unit.CONCURRENT else self.period_s
        return (self.scope, self.unit, period, self.target)


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    rules: tuple[LimitRule, ...]
    priority: int  # 0 is refused first when the house is full
    weight: int  # share of a queue and of the engine
    cached_permille: int = 1000  # what a cached input token weighs in limits
    queue_wait_s: float = 0.0  # how long a request over a limit may wait; 0 refuses at once
    queue_length: int = 0  # of one tenant, in one gateway process
    expected_output: int = 256  # tokens, until the tenant's own habit is known


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
)
PLANS = {plan.name: plan for plan in (FREE, STANDARD, PREMIUM)}


def for_batches(plan: Plan) -> Plan:
    """The plan of a batch's lines: behind everybody who waits for an answer, and not counted
    against what the tenant may do per minute; its money binds as ever."""
    return replace(plan, rules=(), priority=BATCH_PRIORITY, queue_wait_s=0.0, queue_length=0)


def with_rules(plan: Plan, rules: tuple[LimitRule, ...]) -> Plan:
    """The plan as one tenant has it."""
    if not rules:
        return plan
    merged = {rule.slot: rule for rule in plan.rules}
    merged.update({rule.slot: rule for rule in rules})
    return replace(plan, rules=tuple(merged.values()))
