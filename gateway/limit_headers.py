"""The limits as clients read them: OpenAI's headers, Anthropic's, and the IETF draft's (11)."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cache, lru_cache

from core.counters import BucketState
from core.tenants.plans import Plan

# The draft registers no unit for tokens: a prefixed one, so that none is taken for another's.
_TOKEN_UNIT = "tollhouse-tokens"
# What a header is named after, and how the units end that it tells of.
_OPENAI = (("requests", "requests"), ("tokens", "tokens"))
_ANTHROPIC = (
    ("requests", "requests"),
    ("tokens", "total_tokens"),
    ("input-tokens", "input_tokens"),
    ("output-tokens", "output_tokens"),
)


def openai_headers(buckets: Iterable[BucketState]) -> dict[str, str]:
    """`x-ratelimit-*`, of the tightest bucket of each kind."""
    found: dict[str, str] = {}
    for kind, state in _tightest(buckets, _OPENAI).items():
        found[f"x-ratelimit-limit-{kind}"] = str(state.capacity)
        found[f"x-ratelimit-remaining-{kind}"] = str(state.remaining)
        found[f"x-ratelimit-reset-{kind}"] = go_duration(state.reset_ms)
    return found


def anthropic_headers(buckets: Iterable[BucketState], now: datetime) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, state in _tightest(buckets, _ANTHROPIC).items():
        full = now + timedelta(milliseconds=state.reset_ms)
        head = f"anthropic-ratelimit-{kind}"
        found[f"{head}-limit"] = str(state.capacity)
        found[f"{head}-remaining"] = str(state.remaining)
        found[f"{head}-reset"] = full.isoformat(timespec="seconds").replace("+00:00", "Z")
    return found


def ietf_headers(buckets: Iterable[BucketState]) -> dict[str, str]:
    """`RateLimit-Policy` and `RateLimit`; `t` is the seconds until the bucket is full again."""
    policies, states = [], []
    for state in buckets:
        name, policy = _policy(state.key, state.capacity, state.period_ms)
        policies.append(policy)
        states.append(f'"{name}";r={state.remaining};t={_seconds_up(state.reset_ms)}')
    if not policies:
        return {}
    return {"ratelimit-policy": ", ".join(policies), "ratelimit": ", ".join(states)}


@lru_cache(maxsize=20_000)
def _policy(key: str, capacity: int, period_ms: int) -> tuple[str, str]:
    """A bucket's name and its policy, which stay while the plan does."""
    name = _short(key).replace(":", "-")
    unit = f';qu="{_TOKEN_UNIT}"' if "tokens" in name else ""
    return name, f'"{name}";q={capacity};w={period_ms // 1000}{unit}'


def own_headers(
    plan: Plan, *, mode: str = "shared", queued_ms: int = 0, shadow: tuple[str, ...] = ()
) -> dict[str, str]:
    """What no convention covers: the weight of cached tokens, the counting mode, time queued."""
    found = {"x-tollhouse-cached-token-weight": f"{plan.cached_permille / 1000:g}"}
    if mode != "shared":
        found["x-tollhouse-limits"] = mode
    if queued_ms:
        found["x-tollhouse-queued-ms"] = str(queued_ms)
    if shadow:
        found["x-tollhouse-shadow-limits"] = ", ".join(_short(key) for key in shadow)
    return found


def retry_headers(retry_after_s: float | None) -> dict[str, str]:
    """Rounded up: a client that waits so long gets through."""
    if retry_after_s is None:
        return {}
    millis = max(1, -int(-retry_after_s * 1000 // 1))
    return {"retry-after": str(_seconds_up(millis)), "retry-after-ms": str(millis)}


def go_duration(millis: int) -> str:
    """`12ms`, `1s`, `6m0s`, `1.5s`, `2h0m0s`: as OpenAI's clients parse it."""
    if millis < 1000:
        return f"{millis}ms" if millis else "0s"
    minutes, rest = divmod(millis, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def _tightest(
    buckets: Iterable[BucketState], kinds: tuple[tuple[str, str], ...]
) -> dict[str, BucketState]:
    tightest: dict[str, BucketState] = {}
    for state in buckets:
        for kind in _kinds_of(state.key.split(":", 2)[1], kinds):
            other = tightest.get(kind)
            if other is None or state.remaining * other.capacity < other.remaining * state.capacity:
                tightest[kind] = state
    return tightest


@cache
def _kinds_of(unit: str, kinds: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(kind for kind, wanted in kinds if unit.endswith(wanted))


def _short(key: str) -> str:
    """`tenant:requests:60:org_x` without whose it is."""
    return key.rpartition(":")[0]


def _seconds_up(millis: int) -> int:
    return -(-millis // 1000)
