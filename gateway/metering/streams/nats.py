"""NATS JetStream as the stream: one work-queue stream, a subject for each tenant, one durable consumer.

A work queue deletes a message when it is acknowledged and at no other time, so what the stream holds
is what is not stored yet. A stream of that name that would delete messages earlier is refused.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Coroutine, Sequence
from datetime import datetime
from typing import Any, TypeVar

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError, NotFoundError

from core.errors import SettingError
from gateway.metering.streams.base import Delivery, Lag, Mark, Message, StreamDown

log = logging.getLogger("tollhouse.stream")
Result = TypeVar("Result")
CONSUMER = "store"
# Long enough for a batch whose database is slow; a killed consumer's messages wait so long.
ACK_WAIT_S = 60.0
# A batch that is published again within it is kept once; later, the database recognises it.
DUPLICATES_S = 600.0
_HEADERS = 1024  # bytes of a message besides its body
_AT_ONCE = 256
_AGAIN_S = 1.0
# The client's own, two minutes, would leave a consumer deaf for six behind a connection that went silent:
# nothing to fetch looks the same.
_MOST_PINGS = 1


class NatsStream:
    """Safe to use from several threads: a thread of its own runs the client's event loop."""

    def __init__(
        self,
        servers: Sequence[str],
        name: str,
        *,
        replicas: int = 1,
        credentials: str = "",
        timeout_s: float = 5.0,
        ack_wait_s: float = ACK_WAIT_S,
    ) -> None:
        """A server that leaves pings, each `timeout_s`, unanswered is gone."""
        self.name = name
        self.most_bytes = 2**20 - _HEADERS  # until the server has said
        self._servers = list(servers)
        self._replicas = replicas
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._ack_wait_s = ack_wait_s
        self._ping_s = max(1, round(timeout_s))
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connecting: asyncio.Lock | None = None
        self._client: Client | None = None
        self._messages: JetStreamContext.PullSubscription | None = None

    def publish(self, messages: Sequence[Message]) -> None:
        self._run(self._publish(messages))

    def fetch(self, most: int, wait_s: float) -> list[Delivery]:
        return self._run(self._fetch(most, wait_s), more_s=wait_s)

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        self._run(self._answer(deliveries, stored=True))

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        self._run(self._answer(deliveries, stored=False))

    def lag(self) -> Lag:
        return self._run(self._lag())

    def mark(self) -> Mark:
        return {0: self._run(self._state()).last_seq}

    def is_stored(self, mark: Mark) -> bool:
        state = self._run(self._state())
        return bool(state.messages == 0 or state.first_seq > mark[0])

    def close(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        done = asyncio.run_coroutine_threadsafe(self._end(), loop)
        try:
            done.result(self._timeout_s)
        except Exception as error:
            log.debug("the connection to the stream ended with: %s", error)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(self._timeout_s)
        loop.close()

    def _run(self, work: Coroutine[Any, Any, Result], *, more_s: float = 0.0) -> Result:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="tollhouse-nats", daemon=True
                )
                self._thread.start()
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(self._bounded(work, more_s), loop)
        return future.result()

    async def _bounded(self, work: Coroutine[Any, Any, Result], more_s: float) -> Result:
        """The result within the time-out. After a failure the next call connects again."""
        try:
            async with asyncio.timeout(2 * self._timeout_s + more_s):
                return await work
        except SettingError:
            raise
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await self._disconnect()
            raise StreamDown(
                f"The stream {self.name} on {self._places()} does not answer:"
                f" {error or type(error).__name__}.",
                next_step="Check TOLLHOUSE_STREAM_URL and the NATS server.",
                retry_after_s=5.0,
            ) from None

    def _places(self) -> str:
        return ", ".join(re.sub(r"//.*@", "//", each) for each in self._servers)

    async def _connection(self) -> JetStreamContext:
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None or self._client.is_closed:
                self._client = await self._connected()
                self.most_bytes = self._client.max_payload - _HEADERS
                self._messages = None
                await self._ensure(self._client.jetstream(timeout=self._timeout_s))
            return self._client.jetstream(timeout=self._timeout_s)

    async def _connected(self) -> Client:
        options = {"user_credentials": self._credentials} if self._credentials else {}
        client = Client()
        try:
            await client.connect(
                self._servers,
                allow_reconnect=False,
                connect_timeout=max(1, int(self._timeout_s)),
                ping_interval=self._ping_s,
                max_outstanding_pings=_MOST_PINGS,
                error_cb=_note,
                **options,
            )
        except BaseException:  # the client leaves the socket of a connection that failed open
            await _close(client)
            raise
        return client

    async def _end(self) -> None:
        """Disconnect, and let the client's own tasks close their sockets before the loop stops."""
        await self._disconnect()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, left = await asyncio.wait(others, timeout=1.0)
            for task in left:
                task.cancel()
        await asyncio.sleep(0)

    async def _disconnect(self) -> None:
        client, self._client, self._messages = self._client, None, None
        if client is not None and not client.is_closed:
            await _close(client)

    async def _ensure(self, stream: JetStreamContext) -> None:
        wanted = api.StreamConfig(
            name=self.name,
            subjects=[f"{self.name}.>"],
            retention=api.RetentionPolicy.WORK_QUEUE,
            discard=api.DiscardPolicy.NEW,
            storage=api.StorageType.FILE,
            num_replicas=self._replicas,
            duplicate_window=DUPLICATES_S,
        )
        try:
            found = (await stream.stream_info(self.name)).config
        except NotFoundError:
            try:
                found = (await stream.add_stream(wanted)).config
            except BadRequestError:  # another process has just made it
                found = (await stream.stream_info(self.name)).config
        if problem := _would_lose(found):
            raise SettingError(
                f"The NATS stream {self.name} {problem}, so usage could be lost.",
                next_step="Delete that stream, or name another with ?stream= in TOLLHOUSE_STREAM_URL.",
            )
        consumer = api.ConsumerConfig(
            durable_name=CONSUMER,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait_s,
            max_deliver=-1,
            max_ack_pending=10_000,
        )
        try:
            await stream.consumer_info(self.name, CONSUMER)
        except NotFoundError:
            await stream.add_consumer(self.name, consumer)

    async def _publish(self, messages: Sequence[Message]) -> None:
        stream = await self._connection()
        gate = asyncio.Semaphore(_AT_ONCE)

        async def _one(message: Message) -> None:
            subject = f"{self.name}.{subject_part(message.tenant_id)}"
            async with gate:
                await stream.publish(
                    subject, message.body, stream=self.name, headers={"Nats-Msg-Id": message.id}
                )

        tasks = [asyncio.create_task(_one(message)) for message in messages]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, most: int, wait_s: float) -> list[Delivery]:
        stream = await self._connection()
        if self._messages is None:
            self._messages = await stream.pull_subscribe_bind(CONSUMER, self.name)
        try:
            found = await self._messages.fetch(most, timeout=wait_s)
        except TimeoutError:
            return []
        return [
            Delivery(f"{each.subject} {each.metadata.sequence.stream}", each.data, each)
            for each in found
        ]

    async def _answer(self, deliveries: Sequence[Delivery], *, stored: bool) -> None:
        client = self._client
        if client is None:
            return  # the server delivers them again when their time is up
        for each in deliveries:
            if stored:
                await each.handle.ack()
            else:
                await each.handle.nak(delay=_AGAIN_S)
        await client.flush(timeout=max(1, int(self._timeout_s)))

    async def _state(self) -> api.StreamState:
        stream = await self._connection()
        return (await stream.stream_info(self.name)).state

    async def _lag(self) -> Lag:
        stream, state = await self._connection(), await self._state()
        if state.messages == 0:
            return Lag(0, None)
        try:
            first = await stream.get_msg(self.name, state.first_seq)
        except NotFoundError:  # stored meanwhile
            return Lag(state.messages, None)
        oldest: datetime | None = first.time
        return Lag(state.messages, oldest)


def subject_part(tenant_id: str) -> str:
    """A part of a subject has no dots, wildcards or spaces."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", tenant_id) or "_"


def _would_lose(config: api.StreamConfig) -> str:
    if config.retention != api.RetentionPolicy.WORK_QUEUE:
        return f"has the retention {config.retention!s}, not workqueue"
    if (
        config.discard != api.DiscardPolicy.NEW
        and max(config.max_msgs or 0, config.max_bytes or 0) > 0
    ):
        return "discards old messages when it is full"
    if config.max_age:
        return f"deletes messages after {config.max_age:.0f} s"
    return ""


async def _close(client: Client) -> None:
    try:
        await asyncio.wait_for(client.close(), 1.0)
    except (nats.errors.Error, OSError, TimeoutError) as error:
        log.debug("the connection to the stream ended with: %s", error)


async def _note(error: Exception) -> None:
    log.debug("the stream's connection: %s", error)
