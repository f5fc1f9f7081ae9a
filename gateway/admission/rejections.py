"""Rejections by limits, each with its reason and the bucket states for the response headers."""

from core.counters import BucketState, Denial
from core.errors import InsufficientQuota, RateLimited, TollhouseError, Unavailable


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


def out_of_money_error(denial: Denial) -> OutOfMoney:
    error = OutOfMoney(
        "The budget or prepaid balance does not cover this request.",
        next_step="Raise the budget or top up the balance, then try again.",
    )
    error.buckets = denial.buckets
    return error


def too_large_error(denial: Denial) -> OverLimit:
    """The prompt alone exceeds a limit's capacity, so no wait helps."""
    state = next(s for s in denial.buckets if s.key in denial.keys and s.wait_ms is None)
    error = OverLimit(
        f"The request exceeds the whole limit {_limit_names((state.key,))} of {state.capacity}.",
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
        f"Limit reached: {_limit_names(denial.keys)}.",
        next_step="Wait until a running request ends."
        if slots
        else "Retry after the time in the retry-after header.",
        retry_after_s=wait,
    )
    error.reason = _limit_names(denial.keys[:1])
    error.buckets = denial.buckets
    return error


def _limit_names(keys: tuple[str, ...]) -> str:
    return ", ".join(key.rpartition(":")[0] for key in keys)
