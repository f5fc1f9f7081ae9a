"""The limits as clients read them: OpenAI's headers, Anthropic's, and the IETF draft's (11)."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from core.counters import BucketState
from core.tenants.plans import Plan

# The draft registers no unit for tokens: a prefixed one, so that none is taken for another's.
_TOKEN_UNIT = "tollhouse-tokens"


def openai_headers(buckets: Iterable[BucketState]) -> dict[str, str]:
    """`x-ratelimit-*`, of the tightest bucket of each kind."""
    found: dict[str, str] = {}
    for kind, state in _tightest(buckets, {"requests": "requests", "tokens": "tokens"}).items():
        found[f"x-ratelimit-limit-{kind}"] = str(state.capacity)
        found[f"x-ratelimit-remaining-{kind}"] = str(state.remaining)
        found[f"x-ratelimit-reset-{kind}"] = go_duration(state.reset_ms)
    return found


def anthropic_headers(buckets: Iterable[BucketState], now: datetime) -> dict[str, str]:
    kinds = {
        "requests": "requests",
        "tokens": "total_tokens",
        "input-tokens": "input_tokens",
        "output-tokens": "output_tokens",
    }
    found: dict[str, str] = {}
    for kind, state in _tightest(buckets, kinds).items():
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
        name = _short(state.key).replace(":", "-")
        unit = f';qu="{_TOKEN_UNIT}"' if "tokens" in name else ""
        policies.append(f'"{name}";q={state.capacity};w={state.period_ms // 1000}{unit}')
        states.append(f'"{name}";r={state.remaining};t={_seconds_up(state.reset_ms)}')
    if not policies:
        return {}
    return {"ratelimit-policy": ", ".join(policies), "ratelimit": ", ".join(states)}


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


def _tightest(buckets: Iterable[BucketState], kinds: dict[str, str]) -> dict[str, BucketState]:
    tightest: dict[str, BucketState] = {}
    for state in buckets:
        unit = state.key.split(":")[1]
        for kind, wanted in kinds.items():
            if not unit.endswith(wanted):
                continue
            other = tightest.get(kind)
            if other is None or state.remaining * other.capacity < other.remaining * state.capacity:
                tightest[kind] = state
    return tightest


def _short(key: str) -> str:
    """`tenant:requests:60:org_x` without whose it is."""
    return key.rpartition(":")[0]


def _seconds_up(millis: int) -> int:
    return -(-millis // 1000)
