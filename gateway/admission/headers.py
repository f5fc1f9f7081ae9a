"""Rate limit headers: OpenAI's, Anthropic's and the IETF draft's (ratelimit-headers-11)."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from operator import attrgetter

from msgspec import Struct

from core import compiled
from core.tenants.plans import Plan
from gateway.admission.request import LimitState
from gateway.request.exchange import Headers

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
_OPENAI_NAMES = ("x-ratelimit-limit-{}", "x-ratelimit-remaining-{}", "x-ratelimit-reset-{}")
_ANTHROPIC_NAMES = (
    "anthropic-ratelimit-{}-limit",
    "anthropic-ratelimit-{}-remaining",
    "anthropic-ratelimit-{}-reset",
)


class _Kind(Struct, frozen=True):
    """The headers of one kind of limit."""

    # By the index of each of its buckets: the header that tells the limit.
    limits: dict[int, tuple[bytes, bytes]]
    remaining: bytes
    reset: bytes
    buckets: tuple[tuple[int, int], ...]  # the index and the limit of each


class _Template(Struct, frozen=True):
    """What the headers of a plan's buckets have in common."""

    openai: tuple[_Kind, ...]
    anthropic: tuple[_Kind, ...]
    policies: tuple[bytes, bytes]  # the whole header
    states: bytes  # of `RateLimit`, with two places for each bucket
    # OpenAI's headers, written in C; None where the extension is not built.
    openai_fields: "compiled.Fields | None"  # quoted, because the name may be None


_STATES_NAME = b"ratelimit"
_CONSTANT = attrgetter("key", "capacity", "period_ms")  # for a plan
_MAX_TEMPLATES = 20_000


@lru_cache(maxsize=_MAX_TEMPLATES)
def _template(fields: tuple[tuple[str, int, int], ...]) -> _Template:
    policies, states, names = [], [], []
    for key, capacity, period_ms in fields:
        name = _without_owner(key).replace(":", "-")
        unit = f';qu="{_TOKEN_UNIT}"' if "tokens" in name else ""
        policies.append(f'"{name}";q={capacity};w={period_ms // 1000}{unit}')
        states.append(f'"{name.replace("%", "%%")}";r=%d;t=%d')
        names.append(f'"{name}"'.encode())
    limits = [(key.split(":", 2)[1], capacity) for key, capacity, _ in fields]
    openai = _kinds(limits, _OPENAI, _OPENAI_NAMES)
    policies_header = (b"ratelimit-policy", ", ".join(policies).encode())
    written = [(k.remaining, k.reset, tuple(k.limits.values()), k.buckets) for k in openai]
    return _Template(
        openai,
        _kinds(limits, _ANTHROPIC, _ANTHROPIC_NAMES),
        policies_header,
        ", ".join(states).encode(),
        None
        if compiled.Fields is None
        else compiled.Fields(tuple(written), policies_header, _STATES_NAME, tuple(names)),
    )


def _kinds(
    given: Sequence[tuple[str, int]], kinds: tuple[tuple[str, str], ...], names: tuple[str, ...]
) -> tuple[_Kind, ...]:
    """The kinds that have buckets. `given`: unit and limit of each bucket."""
    found = []
    for kind, suffix in kinds:
        limit, remaining, reset = [name.format(kind).encode() for name in names]
        of_kind = [(n, of) for n, (unit, of) in enumerate(given) if unit.endswith(suffix)]
        if of_kind:
            limits = {n: (limit, b"%d" % of) for n, of in of_kind}
            found.append(_Kind(limits, remaining, reset, tuple(of_kind)))
    return tuple(found)


def bucket_headers(style: str, state: LimitState, now: datetime) -> Headers:
    """Those of the API style (openai or anthropic), and the IETF draft's."""
    if not state.buckets:
        return []
    template, remaining, reset_ms = (
        _template(tuple(map(_CONSTANT, state.buckets))),
        state.remaining,
        state.reset_ms,
    )
    if style != "anthropic" and template.openai_fields is not None:
        return template.openai_fields.write(remaining, reset_ms)
    headers: Headers = []
    if style == "anthropic":
        for kind in template.anthropic:
            index = _tightest(remaining, kind)
            full = now + timedelta(milliseconds=reset_ms[index])
            reset = full.isoformat(timespec="seconds").replace("+00:00", "Z")
            headers += (
                kind.limits[index],
                (kind.remaining, b"%d" % remaining[index]),
                (kind.reset, reset.encode()),
            )
    else:  # `x-ratelimit-*` for the tightest bucket of each kind
        for kind in template.openai:
            index = _tightest(remaining, kind)
            headers += (
                kind.limits[index],
                (kind.remaining, b"%d" % remaining[index]),
                (kind.reset, go_duration(reset_ms[index]).encode()),
            )
    # `RateLimit-Policy` and `RateLimit`; `t` is the seconds until the bucket is full again.
    values = [0] * (2 * len(remaining))
    values[::2] = remaining
    values[1::2] = [(each + 999) // 1000 for each in reset_ms]
    headers += (template.policies, (_STATES_NAME, template.states % tuple(values)))
    return headers


def _tightest(remaining: Sequence[int], kind: _Kind) -> int:
    """The index of the kind's bucket that has the smallest part of its limit left."""
    tightest, left, limit = 0, 1, 0  # more than any
    for index, capacity in kind.buckets:
        if remaining[index] * limit < left * capacity:
            tightest, left, limit = index, remaining[index], capacity
    return tightest


def tollhouse_headers(
    plan: Plan, *, mode: str = "shared", queued_ms: int = 0, shadow: tuple[str, ...] = ()
) -> Headers:
    """`x-tollhouse-*`: the weight of cached tokens, the counting mode, time queued, shadow limits."""
    result = [_weight_header(plan.cached_permille)]
    if mode != "shared":
        result.append((b"x-tollhouse-limits", mode.encode()))
    if queued_ms:
        result.append((b"x-tollhouse-queued-ms", b"%d" % queued_ms))
    if shadow:
        names = ", ".join(_without_owner(key) for key in shadow)
        result.append((b"x-tollhouse-shadow-limits", names.encode()))
    return result


@lru_cache(maxsize=1_001)
def _weight_header(cached_permille: int) -> tuple[bytes, bytes]:
    return b"x-tollhouse-cached-token-weight", f"{cached_permille / 1000:g}".encode()


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


def _without_owner(key: str) -> str:
    """The key without its owner: `tenant:requests:60:org_x` becomes `tenant:requests:60`."""
    return key.rpartition(":")[0]


def _ceil_seconds(millis: int) -> int:
    return -(-millis // 1000)
