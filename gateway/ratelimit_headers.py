"""The limits' state as headers: OpenAI's family, and draft 11 of the IETF's RateLimit fields."""

from collections.abc import Iterable

from core.counters import BucketState
from gateway.exchange import Headers

_KINDS = ((b"requests", ":requests:"), (b"tokens", "tokens:"))


def ratelimit_headers(buckets: Iterable[BucketState]) -> Headers:
    states = list(buckets)
    headers: Headers = []
    for name, mark in _KINDS:
        own = [state for state in states if mark in state.key]
        if own:
            headers += _openai(name, min(own, key=_share_left))
    if states:
        headers.append((b"ratelimit-policy", _joined(_policy(state) for state in states)))
        headers.append((b"ratelimit", _joined(_left(state) for state in states)))
    return headers


def duration(millis: int) -> str:
    """Go's form, as OpenAI writes it: 12ms, 1s, 6m0s, 1h0m5s."""
    if millis < 1000:
        return f"{millis}ms"
    seconds = -(-millis // 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _share_left(state: BucketState) -> float:
    return state.remaining / state.capacity


def _openai(name: bytes, state: BucketState) -> Headers:
    return [
        (b"x-ratelimit-limit-" + name, str(state.capacity).encode()),
        (b"x-ratelimit-remaining-" + name, str(state.remaining).encode()),
        (b"x-ratelimit-reset-" + name, duration(state.reset_ms).encode()),
    ]


def _label(state: BucketState) -> str:
    """`tenant:requests:60` of the key `tenant:requests:60:<owner>`; the owner stays ours."""
    return state.key.rpartition(":")[0]


def _policy(state: BucketState) -> str:
    return f'"{_label(state)}";q={state.capacity};w={state.period_ms // 1000}'


def _left(state: BucketState) -> str:
    return f'"{_label(state)}";r={state.remaining};t={-(-state.reset_ms // 1000)}'


def _joined(parts: Iterable[str]) -> bytes:
    return ", ".join(parts).encode()
