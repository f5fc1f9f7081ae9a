"""Rejections by limits, each with its reason and the bucket states for the response headers, and
their counts: in the metric, and per tenant for the database, with queue waits.

A crash loses the counts since the last write. They are shown to people; nothing is billed by them.
"""

import asyncio
import logging
import math
from collections import defaultdict
from urllib.parse import unquote

from core import metrics
from core.clock import Clock
from core.counters import BucketState, Denial
from core.database import Database
from core.errors import EngineLost, InsufficientQuota, RateLimited, TollhouseError, Unavailable
from core.tenants.plans import limit_in_words
from core.tenants.rejections import RejectionCount, add
from gateway.edge.threads import Work, run_as

log = logging.getLogger("tollhouse.rejections")
FLUSH_S = 5.0
_LEVELS = {"tenant": "organisation"}
_UNITS = {"concurrent": "concurrent requests"}
_PERIODS = {"1": "second", "60": "minute", "3600": "hour", "86400": "day"}


class Rejection(TollhouseError):
    """A rejection by admission. `reason` labels it in metrics and on the limits page: the name of
    a limit; empty: the error's code. `buckets` is the state for the headers."""

    reason = ""
    buckets: tuple[BucketState, ...] = ()


class OverLimit(RateLimited, Rejection):
    """429."""


class OutOfMoney(InsufficientQuota, Rejection):
    reason = "money"


class Overloaded(Unavailable, Rejection):
    """503: the gateway runs as many requests as it may."""

    reason = "overloaded"


def out_of_money_error(denial: Denial, output_tokens: int = 0) -> OutOfMoney:
    """`output_tokens`: so many would be covered."""
    less = f", or set the maximum of output tokens to {output_tokens}" if output_tokens else ""
    error = OutOfMoney(
        "The budget or prepaid balance does not cover this request.",
        next_step=f"Raise the budget or top up the balance{less}, then try again.",
    )
    error.buckets = denial.buckets
    return error


def money_ended_error() -> OutOfMoney:
    """Of an answer that was admitted, and needs more than the money that is left."""
    return OutOfMoney(
        "The budget or prepaid balance does not cover the rest of this answer.",
        next_step="Raise the budget or top up the balance, or ask for fewer output tokens.",
    )


def too_large_error(denial: Denial) -> OverLimit:
    """The prompt alone exceeds a limit's capacity, so no wait helps."""
    state = next(s for s in denial.buckets if s.key in denial.keys and s.wait_ms is None)
    error = OverLimit(
        f"The request exceeds the whole limit of {_in_words(state.key)}, {state.capacity}.",
        next_step="Send a shorter prompt, or ask for a higher limit.",
        code="request_too_large_for_limit",
    )
    error.reason = _limit_names((state.key,))
    error.buckets = denial.buckets
    return error


def over_limit_error(denial: Denial, expected_wait_s: float) -> OverLimit:
    """`expected_wait_s` estimates the wait for a concurrency slot, which has no exact value."""
    slots = set(denial.keys) - {state.key for state in denial.buckets}
    waits = [(s.wait_ms or 0) / 1000 for s in denial.buckets if s.key in denial.keys]
    wait = max([*waits, expected_wait_s if slots else 0.0])
    error = OverLimit(
        f"{_sentence(denial)}.",
        next_step="Wait until a running request ends."
        if slots
        else f"Retry in {math.ceil(wait)} s.",
        retry_after_s=wait,
    )
    error.reason = _limit_names(denial.keys[:1])
    error.buckets = denial.buckets
    return error


def is_final(error: TollhouseError) -> bool:
    """No retry can succeed: the response carries `x-should-retry: false`."""
    return isinstance(error, InsufficientQuota | EngineLost)


class RejectionCounter:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])

    def count(self, error: TollhouseError, tenant_id: str | None) -> None:
        """Count a rejected request, once, under one reason. `tenant_id` is None before
        authentication."""
        reason = getattr(error, "reason", "") or error.code
        metrics.rejections.labels(reason).inc()
        if tenant_id is not None and isinstance(error, Rejection):
            self._counts[tenant_id, reason][0] += 1

    def waited(self, tenant_id: str, reason: str, ms: int) -> None:
        sums = self._counts[tenant_id, reason]
        sums[1] += 1
        sums[2] += ms

    def flush(self) -> None:
        """Blocking. Counts that cannot be written are kept for the next flush."""
        taken, self._counts = self._counts, defaultdict(lambda: [0, 0, 0])
        if not taken:
            return
        hour = self._clock.now().replace(minute=0, second=0, microsecond=0)
        try:
            with self._database.transaction() as session:
                add(
                    session,
                    [
                        RejectionCount(tenant, hour, reason, *s)
                        for (tenant, reason), s in taken.items()
                    ],
                )
        except Exception as error:
            log.warning("could not write rejection counts, retrying in %.0f s: %s", FLUSH_S, error)
            for key, sums in taken.items():
                self._counts[key] = [a + b for a, b in zip(self._counts[key], sums, strict=True)]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await run_as(Work.OWN, self.flush)


def _limit_names(keys: tuple[str, ...]) -> str:
    return ", ".join(key.rpartition(":")[0] for key in keys)


def _sentence(denial: Denial) -> str:
    """`This key may send 3 requests a minute`, of each limit that refused, joined."""
    capacities = {state.key: state.capacity for state in denial.buckets}
    said = [_permission(key, capacities.get(key)) for key in denial.keys]
    text = ", and ".join(said)
    return f"{text[:1].upper()}{text[1:]}"


def _permission(key: str, capacity: int | None) -> str:
    name, _, owner = key.rpartition(":")
    level, _, rest = name.partition(":")
    unit, _, period_s = rest.partition(":")
    who = f"the label {unquote(owner)}" if level == "label" else _WHO.get(level, f"this {level}")
    to_it = " to this model" if level == "model" else ""
    if capacity is None:
        return f"{who} has as many requests running{to_it} as it may ({name})"
    verb = "send" if unit == "requests" else "use"
    return f"{who} may {verb} {limit_in_words(unit, capacity, int(period_s))}{to_it}"


_WHO = {"tenant": "this organisation", "model": "this organisation"}


def _in_words(key: str) -> str:
    """`the key's requests per minute (key:requests:60)`."""
    name = _limit_names((key,))
    level, _, rest = name.partition(":")
    unit, _, period_s = rest.partition(":")
    level = _LEVELS.get(level, level)
    per = f" per {_PERIODS.get(period_s, period_s + ' s')}" if period_s else ""
    return f"the {level}'s {_UNITS.get(unit, unit.replace('_', ' '))}{per} ({name})"
