"""Streams for tests: a stream of a test's own on the NATS server, a topic of its own on Kafka's brokers
or in the client library's cluster, and a proxy."""

import asyncio
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gateway.metering.streams.base import UsageStream
from gateway.metering.streams.opening import open_stream
from gateway.metering.streams.storing import StreamStore
from tests.conftest import KAFKA, NATS, kafka_answers


@contextmanager
def nats_url() -> Iterator[str]:
    """The URL of a stream that is deleted afterwards."""
    import nats

    name = f"test_{uuid.uuid4().hex[:12]}"
    yield f"{NATS}?stream={name}"

    async def _delete() -> None:
        client = await nats.connect(NATS)
        with suppress(nats.js.errors.NotFoundError):
            await client.jetstream().delete_stream(name)
        await client.close()

    asyncio.run(_delete())


@contextmanager
def kafka_url() -> Iterator[str]:
    """The URL of a topic: on the brokers that answer, deleted afterwards; else of a cluster inside the
    client library, which lives as long as its client."""
    if not kafka_answers():
        with _cluster_in_the_client() as servers:
            yield f"kafka://{servers}?topic=usage"
        return
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    name = f"test_{uuid.uuid4().hex[:12]}"
    yield f"kafka://{KAFKA}?topic={name}"
    admin = AdminClient({"bootstrap.servers": KAFKA})
    with suppress(KafkaException, TimeoutError):  # brokers may not let their topics be deleted
        admin.delete_topics([name], operation_timeout=10)[name].result(timeout=20)


@contextmanager
def _cluster_in_the_client() -> Iterator[str]:
    from confluent_kafka import Producer

    cluster = Producer({"bootstrap.servers": "127.0.0.1:1", "test.mock.num.brokers": 1})
    brokers = cluster.list_topics(timeout=10).brokers.values()
    yield ",".join(f"{each.host}:{each.port}" for each in brokers)
    del cluster


@contextmanager
def opened(url: str, timeout_s: float | None = None) -> Iterator[UsageStream]:
    stream = open_stream(url, timeout_s=timeout_s)
    yield stream
    stream.close()


def store_waiting(store: StreamStore, wait_s: float = 0.3) -> int:
    """Store messages until none has come for `wait_s` seconds; returns their number."""
    stored = 0
    while found := store.store_next(wait_s):
        stored += found
    return stored


class Proxy:
    """Passes bytes to a server until it is cut, by a test or after `cut_after` bytes from the clients;
    it then refuses connections until it is mended."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._passed = 0
        self.port = 0
        self.mend()

    def mend(self) -> None:
        self.cut_after: int | None = None
        self._passed = 0
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            _end(self._listener)
            for each in self._open:
                _end(each)
            self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            with self._lock:
                self._open += [client, server]
            for source, to, counts in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=self._pass_on, args=(source, to, counts), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(4096):
                to.sendall(data)
                self._passed += len(data) * counts
                if self.cut_after is not None and self._passed > self.cut_after:
                    self.cut()
        except OSError:
            pass
        finally:
            _end(source)
            _end(to)


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
