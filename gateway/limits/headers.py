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
    found: dict[str, str] = {}
    for kind, state in _tightest(buckets, _OPENAI):
        found[f"x-ratelimit-limit-{kind}"] = str(state.capacity)
        found[f"x-ratelimit-remaining-{kind}"] = str(state.remaining)
        found[f"x-ratelimit-reset-{kind}"] = go_duration(state.reset_ms)
    return found


def anthropic_headers(buckets: Sequence[BucketState], now: datetime) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, state in _tightest(buckets, _ANTHROPIC):
        full = now + timedelta(milliseconds=state.reset_ms)
        head = f"anthropic-ratelimit-{kind}"
        found[f"{head}-limit"] = str(state.capacity)
        found[f"{head}-remaining"] = str(state.remaining)
        found[f"{head}-reset"] = full.isoformat(timespec="seconds").replace("+00:00", "Z")
    return found


def ietf_headers(buckets: Sequence[BucketState]) -> dict[str, str]:
    """`RateLimit-Policy` and `RateLimit`; `t` is the seconds until the bucket is full again."""
    if not buckets:
        return {}
    names, policies = _policies(tuple(map(_LASTING, buckets)))
    states = [
        f"{name};r={state.remaining};t={-(-state.reset_ms // 1000)}"
        for name, state in zip(names, buckets, strict=True)
    ]
    return {"ratelimit-policy": policies, "ratelimit": ", ".join(states)}


_LASTING = attrgetter("key", "capacity", "period_ms")  # constant for a plan


@lru_cache(maxsize=20_000)
def _policies(lasting: tuple[tuple[str, int, int], ...]) -> tuple[list[str], str]:
    """(names of the buckets, value of `RateLimit-Policy`)."""
    names, policies = [], []
    for key, capacity, period_ms in lasting:
        name = _short(key).replace(":", "-")
        unit = f';qu="{_TOKEN_UNIT}"' if "tokens" in name else ""
        names.append(f'"{name}"')
        policies.append(f'"{name}";q={capacity};w={period_ms // 1000}{unit}')
    return names, ", ".join(policies)


def own_headers(
    plan: Plan, *, mode: str = "shared", queued_ms: int = 0, shadow: tuple[str, ...] = ()
) -> dict[str, str]:
    """`x-tollhouse-*`: the weight of cached tokens, the counting mode, time queued, shadow limits."""
    found = {"x-tollhouse-cached-token-weight": f"{plan.cached_permille / 1000:g}"}
    if mode != "shared":
        found["x-tollhouse-limits"] = mode
    if queued_ms:
        found["x-tollhouse-queued-ms"] = str(queued_ms)
    if shadow:
        found["x-tollhouse-shadow-limits"] = ", ".join(_short(key) for key in shadow)
    return found


def retry_headers(retry_after_s: float | None) -> dict[str, str]:
    """Rounded up, so that a client that waits this long is admitted."""
    if retry_after_s is None:
        return {}
    millis = max(1, -int(-retry_after_s * 1000 // 1))
    return {"retry-after": str(_seconds_up(millis)), "retry-after-ms": str(millis)}


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
    found = []
    for kind, places in _places(tuple(map(_KEY, buckets)), kinds):
        tightest = buckets[places[0]]
        for place in places[1:]:
            state = buckets[place]
            if state.remaining * tightest.capacity < tightest.remaining * state.capacity:
                tightest = state
        found.append((kind, tightest))
    return found


_KEY = attrgetter("key")


@lru_cache(maxsize=20_000)
def _places(
    keys: tuple[str, ...], kinds: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """For each kind with buckets: (kind, indices of its buckets)."""
    units = [key.split(":", 2)[1] for key in keys]
    found = [
        (kind, tuple(place for place, unit in enumerate(units) if unit.endswith(wanted)))
        for kind, wanted in kinds
    ]
    return tuple((kind, places) for kind, places in found if places)


def _short(key: str) -> str:
    """The key without its owner: `tenant:requests:60:org_x` becomes `tenant:requests:60`."""
    return key.rpartition(":")[0]


def _seconds_up(millis: int) -> int:
    return -(-millis // 1000)
