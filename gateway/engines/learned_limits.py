"""The limits of a provider's key, as its answers' headers give them, kept for all gateway processes.

A key that has used up what it may is left alone until its provider gives some back, so that a burst
goes to another key or model, or gets the time to come again, without the provider's refusal. Providers
count requests and tokens in buckets that refill steadily, and `reset` is the time until one is full.
"""

import asyncio
import hashlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec import Struct

from core.clock import Clock
from core.counters import DAY_MS, BucketGrant, BucketRequest, Counters, Denial, Take
from core.errors import Unavailable
from core.ids import new_id
from gateway.catalog.upstreams import Upstream
from gateway.engines.upstream_errors import wait_s
from gateway.engines.upstream_limits import upstream_busy

_MINUTE_MS = 60_000
_LONGEST_PAUSE_MS = 600_000
_SYNC_S = 1.0  # at most one comparison with the provider's count in this time
_MOST = 10**9  # of requests or tokens; a larger limit is none
# Below the first share of its tokens a key rests until it has the second one back.
_LOW, _ENOUGH = 0.01, 0.05
_BUSY = frozenset((429, 529))
_OPENAI = "x-ratelimit-{}-{}"
_ANTHROPIC = "anthropic-ratelimit-{1}-{0}"
_TOKENS = ("tokens", "input-tokens", "output-tokens")
_FIELDS = ("limit", "remaining", "reset")
WATCHED = frozenset(
    form.format(each, unit).encode()
    for form in (_OPENAI, _ANTHROPIC)
    for unit in ("requests", *_TOKENS)
    for each in _FIELDS
)
_DURATION = re.compile(
    r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9}(?:\.\d{1,9})?)s)?", re.ASCII
)
_MILLISECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)ms", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)


class ReportedBucket(Struct, frozen=True):
    """What an answer says of one bucket."""

    limit: int
    remaining: int
    reset_s: float | None  # until it is full

    @property
    def is_low(self) -> bool:
        return self.remaining < self.limit * _LOW

    @property
    def rest_s(self) -> float:
        """Until enough of it is back."""
        missing = self.limit - self.remaining
        back = max(1.0, self.limit * _ENOUGH) - self.remaining
        return (self.reset_s or 1.0) * min(1.0, back / missing) if missing > 0 else 0.0


def reported(headers: Mapping[bytes, bytes], unit: str, now: datetime) -> ReportedBucket | None:
    """None without a limit and a rest of it that can be read."""
    for form in (_OPENAI, _ANTHROPIC):
        limit, remaining, reset = (
            headers.get(form.format(each, unit).encode(), b"").decode("latin-1").strip()
            for each in _FIELDS
        )
        if not all(each.isascii() and each.isdecimal() for each in (limit, remaining)):
            continue
        if 0 < int(limit[:12]) <= _MOST and len(remaining) <= 12:
            return ReportedBucket(
                int(limit), min(int(remaining), int(limit)), seconds_of(reset, now)
            )
    return None


def seconds_of(reset: str, now: datetime) -> float | None:
    """Of `6m0s`, `120ms`, `1.5`, or a time as RFC 3339 has it; None for anything else."""
    if found := _MILLISECONDS.fullmatch(reset):
        return float(found[1]) / 1000
    if _NUMBER.fullmatch(reset):
        return float(reset)
    if reset and (found := _DURATION.fullmatch(reset)):
        parts = [float(each or 0) for each in found.groups()]
        return sum(n * each for n, each in zip((86_400, 3_600, 60, 1), parts, strict=True))
    try:
        at = datetime.fromisoformat(reset)
    except ValueError:
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - now).total_seconds())


class LearnedLimits:
    """Of one key and one of its provider's models."""

    def __init__(self, upstream: Upstream, model: str, counters: Counters, clock: Clock) -> None:
        named = "\0".join((upstream.provider, upstream.url, upstream.api_key, model))
        self._group = f"provider_key:{hashlib.sha256(named.encode()).hexdigest()[:24]}"
        self._counters, self._clock = counters, clock
        self._requests: ReportedBucket | None = None
        self._is_daily = False  # its requests are counted by the day
        self._synced_at = -_SYNC_S
        self._work: set[asyncio.Task[None]] = set()

    async def take(self) -> None:
        """Count a request. Raises RateLimited with the code upstream_busy while the key has to wait."""
        try:
            answer = await self._reserve(*self._request(), self._pause(0))
        except Unavailable:
            return  # the provider's own limits hold
        if isinstance(answer, Denial):
            why = f"its key has sent its {answer.buckets[0].capacity} requests"
            raise upstream_busy(why, (answer.wait_ms or 1000) / 1000)
        left = answer.reset_ms[-1]
        if left > 0:
            raise upstream_busy("its key has used up what its provider allows", left / 1000)

    def learn(self, status: int, headers: Mapping[bytes, bytes], retry_after: str) -> None:
        """Take in an answer's headers, in the background."""
        now = self._clock.now()
        rests = [0.0]
        if status in _BUSY:
            rests.append(wait_s(retry_after, now) or 0.0)
        for bucket in (reported(headers, unit, now) for unit in _TOKENS):
            if bucket is not None and bucket.is_low:
                rests.append(bucket.rest_s)
        requests = reported(headers, "requests", now)
        if requests is not None:
            self._requests = requests
            self._is_daily |= (requests.reset_s or 0) > _MINUTE_MS / 1000
        rest_ms = min(_LONGEST_PAUSE_MS, math.ceil(max(rests) * 1000))
        due = self._clock.monotonic() - self._synced_at >= _SYNC_S
        if rest_ms or (requests is not None and due):
            self._synced_at = self._clock.monotonic()
            task = asyncio.ensure_future(self._share(requests, rest_ms))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._work, return_exceptions=True)

    async def _share(self, requests: ReportedBucket | None, rest_ms: int) -> None:
        try:
            if rest_ms:
                await self._lower(self._pause(0), _LONGEST_PAUSE_MS - rest_ms)
            if requests is not None:
                await self._lower(self._bucket(requests, 0), requests.remaining)
        except Unavailable:
            return

    async def _lower(self, take: Take, remaining: int) -> None:
        """Take what the bucket holds above `remaining`: others spend from the same key too."""
        answer = await self._reserve(take)
        if isinstance(answer, BucketGrant) and answer.remaining[0] > remaining:
            above = answer.remaining[0] - remaining
            await self._reserve(Take(take.key, take.capacity, take.period_ms, above, above))

    def _request(self) -> tuple[Take, ...]:
        return (self._bucket(self._requests, 1),) if self._requests is not None else ()

    def _bucket(self, bucket: ReportedBucket, amount: int) -> Take:
        """A changed limit begins a bucket of its own."""
        period = DAY_MS if self._is_daily else _MINUTE_MS
        return Take(f"requests:{bucket.limit}:{period}", bucket.limit, period, amount, amount)

    def _pause(self, amount: int) -> Take:
        """A unit a millisecond: the bucket is full unless the key rests."""
        return Take("pause", _LONGEST_PAUSE_MS, _LONGEST_PAUSE_MS, amount, amount)

    async def _reserve(self, *takes: Take) -> BucketGrant | Denial:
        return await self._counters.reserve(BucketRequest(self._group, new_id("up"), 0, takes))
