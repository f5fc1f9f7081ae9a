"""Rate limit headers: OpenAI's, Anthropic's and the IETF draft's (ratelimit-headers-11)."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from operator import attrgetter

from core.counters import BucketState
from core.tenants.plans import Plan

# The draft registers no quota unit for tokens; the prefix avoids a clash with other vendors.
_TOKEN_UNIT = "tollhouse-tokens"
# (name in the header, suffix of the limit's unit)
_OPENAI = (("requests", "requests"), ("tokens", "tokens"))
_ANTHROPIC = (
    ("requests", "requests"),
    ("tokens", "total_tokens"),
    ("input-tokens", "input_tokens"),
    ("output-tokens", "output_tokens"),
)


def openai_headers(buckets: Sequence[BucketState]) -> dict[str, str]:
    """`x-ratelimit-*` for the tightest bucket of each kind."""
    result: dict[str, str] = {}
    for kind, state in _tightest(buckets, _OPENAI):
        result[f"x-ratelimit-limit-{kind}"] = str(state.capacity)
        result[f"x-ratelimit-remaining-{kind}"] = str(state.remaining)
        result[f"x-ratelimit-reset-{kind}"] = go_duration(state.reset_ms)
    return result


def anthropic_headers(buckets: Sequence[BucketState], now: datetime) -> dict[str, str]:
    result: dict[str, str] = {}
    for kind, state in _tightest(buckets, _ANTHROPIC):
        full = now + timedelta(milliseconds=state.reset_ms)
        head = f"anthropic-ratelimit-{kind}"
        result[f"{head}-limit"] = str(state.capacity)
        result[f"{head}-remaining"] = str(state.remaining)
        result[f"{head}-reset"] = full.isoformat(timespec="seconds").replace("+00:00", "Z")
    return result


def ietf_headers(buckets: Sequence[BucketState]) -> dict[str, str]:
    """`RateLimit-Policy` and `RateLimit`; `t` is the seconds until the bucket is full again."""
    if not buckets:
        return {}
    names, policies = _policies(tuple(map(_POLICY_FIELDS, buckets)))
    states = [
        f"{name};r={state.remaining};t={-(-state.reset_ms // 1000)}"
        for name, state in zip(names, buckets, strict=True)
    ]
    return {"ratelimit-policy": policies, "ratelimit": ", ".join(states)}


_POLICY_FIELDS = attrgetter("key", "capacity", "period_ms")  # constant for a plan


@lru_cache(maxsize=20_000)
def _policies(fields: tuple[tuple[str, int, int], ...]) -> tuple[list[str], str]:
    """(names of the buckets, value of `RateLimit-Policy`)."""
    names, policies = [], []
    for key, capacity, period_ms in fields:
        name = _without_owner(key).replace(":", "-")
        unit = f';qu="{_TOKEN_UNIT}"' if "tokens" in name else ""
        names.append(f'"{name}"')
        policies.append(f'"{name}";q={capacity};w={period_ms // 1000}{unit}')
    return names, ", ".join(policies)


def tollhouse_headers(
    plan: Plan, *, mode: str = "shared", queued_ms: int = 0, shadow: tuple[str, ...] = ()
) -> dict[str, str]:
    """`x-tollhouse-*`: the weight of cached tokens, the counting mode, time queued, shadow limits."""
    result = {"x-tollhouse-cached-token-weight": f"{plan.cached_permille / 1000:g}"}
    if mode != "shared":
        result["x-tollhouse-limits"] = mode
    if queued_ms:
        result["x-tollhouse-queued-ms"] = str(queued_ms)
    if shadow:
        result["x-tollhouse-shadow-limits"] = ", ".join(_without_owner(key) for key in shadow)
    return result


def retry_headers(retry_after_s: float | None) -> dict[str, str]:
    """Rounded up, so that a client that waits this long is admitted."""
    if retry_after_s is None:
        return {}
    millis = max(1, -int(-retry_after_s * 1000 // 1))
    return {"retry-after": str(_ceil_seconds(millis)), "retry-after-ms": str(millis)}


def go_duration(millis: int) -> str:
    """Go's duration format, which OpenAI's clients parse: `12ms`, `1.5s`, `6m0s`, `2h0m0s`."""
    if millis < 1000:
        return f"{millis}ms" if millis else "0s"
    minutes, rest = divmod(millis, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def _tightest(
    buckets: Sequence[BucketState], kinds: tuple[tuple[str, str], ...]
) -> list[tuple[str, BucketState]]:
    result = []
    for kind, indices in _bucket_indices(tuple(map(_KEY, buckets)), kinds):
        tightest = buckets[indices[0]]
        for index in indices[1:]:
            state = buckets[index]
            if state.remaining * tightest.capacity < tightest.remaining * state.capacity:
                tightest = state
        result.append((kind, tightest))
    return result


_KEY = attrgetter("key")


@lru_cache(maxsize=20_000)
def _bucket_indices(
    keys: tuple[str, ...], kinds: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """For each kind with buckets: (kind, indices of its buckets)."""
    units = [key.split(":", 2)[1] for key in keys]
    result = [
        (kind, tuple(index for index, unit in enumerate(units) if unit.endswith(suffix)))
        for kind, suffix in kinds
    ]
    return tuple((kind, indices) for kind, indices in result if indices)


def _without_owner(key: str) -> str:
    """The key without its owner: `tenant:requests:60:org_x` becomes `tenant:requests:60`."""
    return key.rpartition(":")[0]


def _ceil_seconds(millis: int) -> int:
    return -(-millis // 1000)
