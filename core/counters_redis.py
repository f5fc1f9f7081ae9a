"""Counters in Redis, shared by many processes: one script, one round trip, concurrent calls batched.

Keys of a group share a hash tag, so that a Redis Cluster keeps each tenant's counters in one slot.
A server that does not answer within the time-out opens a circuit breaker: calls fail at once until a
background probe succeeds.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis.exceptions import NoScriptError, RedisError

from core.adaptive_timeout import AdaptiveTimeout
from core.clock import Clock
from core.counters import (
    BucketGrant,
    BucketRequest,
    Cap,
    Denial,
    HeldMoney,
    ms_until,
    refused_state,
)
from core.errors import DependencyDown
from core.redis_client import check_mode, connect
from core.redis_pipeline import pipeline_for

log = logging.getLogger("tollhouse.counters")

# The fallback mode must take effect within 50 ms; AdaptiveTimeout adds its grace turns to this, and
# more where the machine is busy or the server is always slow.
TIMEOUT_S = 0.036
# The client's own time-outs know nothing of a loop that is late: they are a last resort, because
# each call is bounded here.
_CLIENT_TIMEOUT_S = 60.0
PROBE_FIRST_S, PROBE_EVERY_S = 0.02, 0.25
_START_S = 3.0
_BATCH = 128
_LINGER_S = 0.005
_UNCERTAIN = 100_000
_GRANTED, _UNSEEDED = 1, 2  # answers of `reserve`; 0 is a denial
_SCRIPT = Path(__file__).with_name("counters.lua")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode

_Call = tuple[tuple[str, str, int, bytes], "asyncio.Future[Any]"]


class RedisCounters:
    def __init__(
        self,
        url: str,
        *,
        prefix: str = "tollhouse",
        clock: Clock | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`clock` is for tests and simulations; by default the Redis server's clock is used."""
        self._prefix = prefix
        self._clock = clock
        self._timeout = AdaptiveTimeout(timeout_s)
        self._client = connect(url, timeout_s=_CLIENT_TIMEOUT_S, connections=8)
        self._pipeline = pipeline_for(self._client)
        self._source = _SCRIPT.read_text()
        self._sha = ""
        self._pending: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender: asyncio.Task[None] | None = None
        self._departure: asyncio.TimerHandle | None = None  # of calls that linger
        self._down = False
        self._uncertain: deque[tuple[str, str, int]] = deque(maxlen=_UNCERTAIN)

    @property
    def down(self) -> bool:
        return self._down

    async def start(self) -> None:
        """Discover the cluster's nodes, load the script and connect, so that the first call meets
        its short time-out. SettingError for an unusable address; a server that does not answer is
        only logged, and the calls fail later."""
        try:
            async with asyncio.timeout(_START_S):
                await check_mode(self._client)
                await self._load_script()
                await self._pipeline.ping()
                await self._timeout.measure(self._pipeline.ping())
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("Redis does not answer yet: %s", error)

    async def reserve(self, bucket_request: BucketRequest) -> BucketGrant | Denial:
        hold = bucket_request.hold
        arguments = (
            bucket_request.id,
            bucket_request.lease_ms,
            [
                (t.key, t.capacity, t.period_ms, t.amount, t.keep, t.shadow)
                for t in bucket_request.takes
            ],
            [(s.key, s.limit, s.shadow, s.count) for s in bucket_request.slots],
            hold.need if hold else 0,
            hold.want if hold else 0,
            [(c.key, c.cap, c.spent) for c in hold.caps] if hold else [],
            hold.seeds if hold else True,
        )
        return _decode_reply(
            bucket_request, await self._call("reserve", bucket_request.group, arguments)
        )

    async def extend(
        self, group: str, id: str, amounts: Sequence[int], need: int, want: int
    ) -> int:
        return int(await self._call("extend", group, (id, list(amounts), need, want)))

    async def settle(self, group: str, id: str, amounts: Sequence[int], spent: int) -> bool:
        """It travels with the next call, or alone after a few milliseconds: no answer waits for it."""
        arguments = (id, list(amounts), spent)
        return bool(await self._call("settle", group, arguments, lingers=True))

    async def keep(self, group: str, id: str) -> None:
        await self._call("keep", group, (id,))

    async def renew(self, group: str, ids: Sequence[str], lease_ms: int) -> None:
        await self._call("renew", group, (list(ids), lease_ms))

    async def restore(self, bucket_request: BucketRequest, held: int) -> bool:
        hold = bucket_request.hold
        arguments = (
            bucket_request.id,
            bucket_request.lease_ms,
            [
                (t.key, t.capacity, t.period_ms, t.amount, t.keep, t.shadow)
                for t in bucket_request.takes
            ],
            [(s.key, s.limit, s.shadow, s.count) for s in bucket_request.slots],
            held,
            [(c.key, c.cap, c.spent) for c in hold.caps] if hold else [],
        )
        return bool(await self._call("restore", bucket_request.group, arguments))

    async def seed(self, group: str, caps: Sequence[Cap]) -> None:
        await self._call("seed", group, ([(c.key, c.cap, c.spent) for c in caps],))

    async def born(self) -> tuple[int, int]:
        began, now = _decode(await self._call("born", "generation", ()))
        return int(began), int(now)

    async def holds(self, group: str, keys: Sequence[str]) -> tuple[HeldMoney, ...]:
        found = _decode(await self._call("holds", group, (list(keys),)))
        pairs = zip(keys, found[::2], found[1::2], strict=True)
        return tuple([HeldMoney(key, int(held), int(sums)) for key, held, sums in pairs])

    async def close(self) -> None:
        """What lingers is sent first: its money would stay held until a lease ends."""
        self._depart()
        if self._sender is not None:
            await asyncio.gather(self._sender, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pipeline.close()
        await self._client.aclose()

    async def _call(
        self, operation: str, group: str, arguments: tuple[Any, ...], *, lingers: bool = False
    ) -> Any:
        if self._down:
            raise _redis_down("does not answer")
        now = -1 if self._clock is None else round(self._clock.monotonic() * 1000)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        call = (f"{{{self._prefix}:{group}}}", operation, now, _encode(arguments))
        self._pending.append((call, reply))
        if not lingers:
            self._depart()
        elif self._departure is None:
            self._departure = loop.call_later(_LINGER_S, self._depart)
        try:
            return await reply
        except DependencyDown:
            self._remember_uncertain(operation, group, arguments)
            raise

    def _depart(self) -> None:
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None
        if self._pending and (self._sender is None or self._sender.done()):
            self._sender = self._start(self._send())

    async def _send(self) -> None:
        """Send the waiting calls in pipelined batches until none is left."""
        while self._pending:
            batch, self._pending = self._pending[:_BATCH], self._pending[_BATCH:]
            try:
                await self._timeout.wait(self._send_batch(batch))
            except (RedisError, OSError, TimeoutError) as error:
                self._trip(str(error) or type(error).__name__)
                lost, self._pending = batch + self._pending, []
                for _, reply in lost:
                    if not reply.done():
                        reply.set_exception(_redis_down("does not answer"))

    async def _send_batch(self, batch: list[_Call]) -> None:
        if not self._sha:
            await self._load_script()
        results = await self._run(batch)
        unloaded = [
            index for index, result in enumerate(results) if isinstance(result, NoScriptError)
        ]
        if unloaded:  # the server has restarted or its scripts were flushed
            await self._load_script()
            again = await self._run([batch[index] for index in unloaded])
            for index, result in zip(unloaded, again, strict=True):
                results[index] = result
        for (_, reply), result in zip(batch, results, strict=True):
            if reply.done():
                continue
            if isinstance(result, Exception):
                log.error("counter script failed: %s", result)
                reply.set_exception(_redis_down("failed"))
            else:
                reply.set_result(result)

    async def _run(self, batch: list[_Call]) -> list[Any]:
        return await self._pipeline.execute(
            [
                ("EVALSHA", self._sha, 1, base, operation, str(now), arguments)
                for (base, operation, now, arguments), _ in batch
            ]
        )

    async def _load_script(self) -> None:
        self._sha = str(await self._client.script_load(self._source))

    def _remember_uncertain(self, operation: str, group: str, arguments: tuple[Any, ...]) -> None:
        """A failed `reserve` may have taken effect on the server: release it later."""
        if operation == "reserve" and arguments[1] > 0:
            self._uncertain.append((group, arguments[0], len(arguments[2])))

    async def _release_uncertain(self) -> None:
        while self._uncertain and not self._down:
            group, id, takes = self._uncertain.popleft()
            try:
                await self._call("settle", group, (id, [0] * takes, 0))
            except DependencyDown:
                self._uncertain.appendleft((group, id, takes))
                return

    def _trip(self, reason: str) -> None:
        if self._down:
            return
        self._down = True
        log.warning("Redis is down for the counters: %s", reason)
        self._start(self._probe())

    async def _probe(self) -> None:
        delay = PROBE_FIRST_S
        while self._down:
            await asyncio.sleep(delay)
            delay = PROBE_EVERY_S
            try:
                # The first answer may be to what waited while the server was away; the second shows
                # how slow it is.
                await self._timeout.wait_long(self._pipeline.ping())
                await self._timeout.measure(self._pipeline.ping())
            except (RedisError, OSError, TimeoutError):
                continue
            self._down = False
            log.warning("Redis answers again")
            await self._release_uncertain()

    def _start(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _decode_reply(bucket_request: BucketRequest, raw: bytes) -> BucketGrant | Denial:
    granted, states, counts, full, left, held = _decode(raw)
    takes = bucket_request.takes
    rows = list(zip(takes, states[::2], states[1::2], strict=True))
    shadows = {take.key for take in takes if take.shadow}
    shadows |= {slot.key for slot in bucket_request.slots if slot.shadow}
    shadow = tuple(key for key in full if key in shadows)
    if granted == _GRANTED:
        return BucketGrant(
            tuple([max(0, take.capacity - used) for take, used, _ in rows]),
            tuple([ms_until(used, carry, take) for take, used, carry in rows]),
            held,
            tuple(counts),
            shadow,
            takes,
        )
    buckets = tuple([refused_state(take, used, carry) for take, used, carry in rows])
    caps = bucket_request.hold.caps if bucket_request.hold else ()
    need = bucket_request.hold.need if bucket_request.hold else 0
    short_caps = tuple(cap.key for cap, each in zip(caps, left, strict=True) if each < need)
    refused = tuple(key for key in full if key not in shadows)
    if granted == _UNSEEDED:
        return Denial(buckets, tuple(counts), refused, shadow=shadow, unseeded=True)
    return Denial(buckets, tuple(counts), refused, short_caps, shadow, max(0, min(left, default=0)))


def _redis_down(what: str) -> DependencyDown:
    return DependencyDown(
        f"Redis {what}, so limits cannot be checked.",
        next_step="Retry shortly. Operators: check TOLLHOUSE_REDIS_URL and the Redis server.",
        retry_after_s=1.0,
    )
