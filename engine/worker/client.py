"""The gateway's client of one engine: asyncio, reconnects, loses no receipt."""

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import zmq
import zmq.asyncio

from engine.errors import AdapterError, ConnectionLost, RequestError
from engine.protocol import (
    AdapterState,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    KvEvent,
    Receipt,
    Refusal,
    StepOutput,
    TokenChunk,
)
from engine.worker import wire
from engine.worker.curve import ClientKeys
from engine.worker.handshakes import FAILED, client_problem
from engine.worker.heartbeat import Liveness

log = logging.getLogger("tollhouse.engine.client")

_KEPT_LOST = 4096  # requests whose receipts may still come

HELLO_RETRY_S = 2.0  # ZeroMQ queues a Hello until the engine is up; it is repeated in case of loss

_LATE_S = 0.5  # of a timer: the event loop was blocked

Item = TokenChunk | Receipt | Exception


class Sink(Protocol):
    """Receives the items of one request: chunks, then a receipt or an error as the last item. After
    ConnectionLost one more may follow: the receipt, or ConnectionLost again if there is none."""

    def put_nowait(self, item: Item) -> None: ...


class EngineClient:
    """Keeps one connection to an engine. When the engine is gone, open streams fail with
    ConnectionLost and the client keeps reconnecting. The engine repeats receipts at each
    connect until `acknowledge`."""

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str | None = None,
        keys: ClientKeys | None = None,
        heartbeat_s: float = 1.0,
        silence_s: float = 30.0,
        grace_s: float = 3.0,
        unanswered_s: float = 10.0,
        on_receipt: Callable[[Receipt], None] | None = None,
        on_kv_events: Callable[[list[KvEvent]], None] | None = None,
    ) -> None:
        """`silence_s`: how long the engine may be silent (during a long step) before it counts as
        gone; `grace_s`: how long streams wait for a broken connection to come back; `on_receipt`
        gets receipts that no open stream is waiting for; `on_kv_events` gets every event, and
        `cleared` before an engine reports its whole cache again."""
        self.address = address
        self.gateway_id = gateway_id or uuid.uuid4().hex
        self.stats: EngineStats | None = None
        self.adapters: dict[str, AdapterState] = {}  # by digest, from Welcome and heartbeats
        self._info: EngineInfo | None = None
        self._keys = keys
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._grace_s = grace_s
        self._unanswered_ms = round(unanswered_s * 1000)
        self._on_receipt = on_receipt
        self._on_kv_events = on_kv_events
        self._streams: dict[str, tuple[Sink, int]] = {}  # with the number of Hellos sent before
        self._hellos = 0
        self._hello_at = 0.0
        self._lost: OrderedDict[str, Sink] = OrderedDict()  # failed; their receipts may still come
        self._begun: set[str] = set()  # of the open streams, those that the engine computes
        self._reading = ""  # path of the adapter that the engine began to read last
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._loads: dict[int, str] = {}  # paths, by the call
        self._numbers = itertools.count(1)
        self._connected = asyncio.Event()
        self._last_number = 0
        self.liveness = Liveness()
        self.problem = ""  # why the last handshake failed
        self._lost_at: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise ConnectionLost(
                f"not connected to the engine at {self.address} yet: call connect() first"
            )
        return self._info

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    async def connect(self, timeout_s: float = 30.0) -> EngineInfo:
        """Waits for the engine's Welcome; may be called again to wait for a reconnect. Raises
        ConnectionLost after `timeout_s`."""
        if self._socket is None:
            self._open()
        try:
            await asyncio.wait_for(self._connected.wait(), timeout_s)
        except TimeoutError:
            why = self.problem or (
                "check that it runs, that the CURVE keys match and that it has the same version"
            )
            raise ConnectionLost(
                f"the engine at {self.address} did not answer within {timeout_s:g} s: {why}"
            ) from None
        return self.info

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk | Receipt]:
        """Yields chunks as they arrive, then the receipt. Raises RequestError when the engine
        refuses the request, and ConnectionLost when the engine is gone. Closing the iterator
        early aborts the request."""
        name = request.request_id
        queue: asyncio.Queue[Item] = asyncio.Queue()
        await self.submit(request, queue)
        finished = False
        try:
            while not finished:
                item = await queue.get()
                finished = not isinstance(item, TokenChunk)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._streams.pop(name, None)
            self._lost.pop(name, None)
            self._begun.discard(name)
            if not finished:
                self.abort_soon(name)

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Like `generate`, but puts the items into `sink` as they arrive: no task, no queue."""
        if not self.connected:
            raise ConnectionLost(f"the engine at {self.address} is not reachable")
        name = request.request_id
        if name in self._streams:
            raise RequestError("duplicate_request", f"request {name} is already running")
        self._streams[name] = (sink, self._hellos)
        self._begun.discard(name)
        try:
            await self._send(wire.Generate(request))
        except BaseException:
            self._streams.pop(name, None)
            raise

    def has_begun(self, request_id: str) -> bool:
        """Whether the engine computes the open request, or did before it fell silent. A process that
        dies within the millisecond of its announcement may not have sent it."""
        return request_id in self._begun

    def abort_soon(self, request_id: str) -> None:
        """Asks the engine to abort; the stream then gets its last chunk and its receipt."""
        self._send_soon(wire.Abort([request_id]))

    async def acknowledge(self, request_ids: list[str]) -> None:
        """Tells the engine that these receipts are stored durably and may be forgotten."""
        await self._send(wire.Acknowledge(request_ids))

    async def load_adapter(self, path: str, timeout_s: float = 120.0) -> AdapterState:
        """Reads a PEFT directory on the engine's machine. Raises AdapterError."""

        def load(call: int) -> wire.LoadAdapter:
            self._loads[call] = path
            return wire.LoadAdapter(call, path)

        return await self._adapter_call(load, timeout_s)

    async def unload_adapter(self, digest: str, timeout_s: float = 30.0) -> AdapterState:
        state = await self._adapter_call(lambda call: wire.UnloadAdapter(call, digest), timeout_s)
        self.adapters.pop(digest, None)
        return state

    async def look_up(self, request_ids: list[str], timeout_s: float = 30.0) -> wire.LookUpReply:
        """The receipts of these requests, and which still run. A request in neither list never
        reached the engine, was acknowledged, or was lost with the engine's process."""
        reply: wire.LookUpReply = await self._call(
            lambda call: wire.LookUp(call, request_ids), timeout_s
        )
        return reply

    async def close(self) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(zmq.ZMQError, asyncio.TimeoutError):
            await asyncio.wait_for(self._send(wire.Goodbye()), 1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all("the client was closed")
        self._socket.disable_monitor()
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket.close(linger=500)
        if self._context is not None:
            self._context.term()
        self._socket = self._context = None
        self._connected.clear()

    # Connection.

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        socket.setsockopt(zmq.RCVHWM, 0)  # unbounded: a slow gateway uses memory, loses no token
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # A connection whose other end is gone can stay open, as behind a balancer that answers for it:
        # one that answers no heartbeat, or finishes no handshake, is replaced.
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(self._heartbeat_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._unanswered_ms)
        socket.setsockopt(zmq.HANDSHAKE_IVL, self._unanswered_ms)
        if self._keys is not None:
            self._keys.apply(socket)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED
        )
        socket.connect(self.address)
        self._socket = socket
        self.liveness.start()
        self._tasks = [
            asyncio.create_task(self._receive_messages()),
            asyncio.create_task(self._send_heartbeats()),
            asyncio.create_task(self._watch_connection(self._monitor)),
        ]
        self._send_hello()

    def _send_hello(self) -> None:
        self._hellos += 1
        self._hello_at = time.monotonic()
        self._send_soon(
            wire.Hello(
                self.gateway_id,
                seen=self._last_number,
                kv_events=self._on_kv_events is not None,
                attempt=self._hellos,
            )
        )

    async def _send(self, record: Any) -> None:
        if self._socket is None:
            raise ConnectionLost("the client is not open: call connect() first")
        await self._socket.send(wire.encode(record))

    def _send_soon(self, record: Any) -> None:
        """Queues for ZeroMQ's I/O thread without waiting."""
        if self._socket is not None:
            sent = asyncio.ensure_future(self._socket.send(wire.encode(record)))
            sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _call(self, make: Callable[[int], Any], timeout_s: float) -> Any:
        if not self.connected:
            raise ConnectionLost(f"the engine at {self.address} is not reachable")
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(make(number))
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise ConnectionLost(
                f"the engine at {self.address} did not answer within {timeout_s:g} s"
            ) from None
        finally:
            self._calls.pop(number, None)
            self._loads.pop(number, None)

    async def _adapter_call(self, make: Callable[[int], Any], timeout_s: float) -> AdapterState:
        reply: wire.AdapterReply = await self._call(make, timeout_s)
        if reply.state is None:
            raise AdapterError(reply.code, reply.message)
        return reply.state

    async def _receive_messages(self) -> None:
        assert self._socket is not None
        while True:
            data = await self._socket.recv()
            try:
                record, number = wire.decode(data)
            except wire.WireError as error:
                log.warning("a message of the engine was dropped: %s", error)
                continue
            self.liveness.received(output=isinstance(record, StepOutput))
            try:
                self._handle(record, number)
            except Exception:
                log.exception("a %s message could not be processed", type(record).__name__)

    def _handle(self, record: Any, number: int) -> None:
        if isinstance(record, wire.Identify):
            self._connected.clear()
            self._send_hello()
            return
        if isinstance(record, wire.Welcome):
            self._welcome(record)
            self._last_number = number
            return
        if number != self._last_number + 1:
            log.warning("messages %d to %d were lost", self._last_number + 1, number - 1)
            self._send_soon(wire.Abort(list(self._streams)))
            self._fail_all("messages were lost")
            self._report_kv_events([KvEvent("cleared", [])])
        self._last_number = number
        match record:
            case StepOutput():
                for chunk in record.chunks:
                    self._deliver(chunk.request_id, chunk)
                for receipt in record.receipts:
                    self._deliver(receipt.request_id, receipt)
            case Refusal():
                self._deliver(record.request_id, RequestError(record.code, record.message))
            case EngineStats():
                self.stats = record
                self._update_adapters(record.adapters)
            case wire.AdapterReply() | wire.LookUpReply():
                if isinstance(record, wire.AdapterReply) and record.state is not None:
                    self._update_adapters([record.state])
                future = self._calls.get(record.call)
                if future is not None and not future.done():
                    future.set_result(record)
            case wire.KvEvents(events):
                self._report_kv_events(events)
            case wire.Began(request_ids, path):
                self._begun.update(each for each in request_ids if each in self._streams)
                self._reading = path or self._reading

    def _report_kv_events(self, events: list[KvEvent]) -> None:
        if self._on_kv_events is not None:
            self._on_kv_events(events)

    def _update_adapters(self, changed: list[AdapterState]) -> None:
        for state in changed:
            if state.state == "gone":
                self.adapters.pop(state.digest, None)
            else:
                self.adapters[state.digest] = state

    def _deliver(self, request_id: str, item: Item) -> None:
        last = not isinstance(item, TokenChunk)
        if last:
            self._begun.discard(request_id)
        stream = self._streams.pop(request_id, None) if last else self._streams.get(request_id)
        if stream is not None:
            stream[0].put_nowait(item)
        elif isinstance(item, Receipt):
            lost = self._lost.pop(request_id, None)
            if lost is not None:
                lost.put_nowait(item)
            elif self._on_receipt is not None:
                self._on_receipt(item)

    def _welcome(self, welcome: wire.Welcome) -> None:
        restarted = self._info is not None and self._info.engine_id != welcome.info.engine_id
        self._info, self.stats = welcome.info, welcome.stats
        self.adapters = {state.digest: state for state in welcome.stats.adapters}
        self._report_kv_events([KvEvent("cleared", [])])
        self._lost_at = None
        for receipt in welcome.receipts:  # before what has none is given up
            self._deliver(receipt.request_id, receipt)
        alive = set(welcome.under_way)
        for name, (_, hellos) in list(self._streams.items()):
            if name not in alive and hellos < welcome.attempt:
                self._fail(name, "the engine restarted or lost the request")
        for name in [each for each in self._lost if each not in alive]:
            self._lost.pop(name).put_nowait(ConnectionLost(f"{self.address}: there is no receipt"))
        if restarted:
            self._fail_calls("the engine restarted")
        self._connected.set()

    def _fail(self, name: str, why: str) -> None:
        stream = self._streams.pop(name, None)
        if stream is not None:
            lost = ConnectionLost(f"{self.address}: {why}", begun=name in self._begun)
            self._lost[name] = stream[0]
            if len(self._lost) > _KEPT_LOST:
                self._lost.popitem(last=False)
            stream[0].put_nowait(lost)
        self._begun.discard(name)

    def _fail_all(self, why: str) -> None:
        for name in list(self._streams):
            self._fail(name, why)
        self._fail_calls(why)

    def _fail_calls(self, why: str) -> None:
        for number, future in self._calls.items():
            begun = self._reading != "" and self._loads.get(number) == self._reading
            if not future.done():
                future.set_exception(ConnectionLost(f"{self.address}: {why}", begun=begun))
        self._reading = ""

    async def _send_heartbeats(self) -> None:
        """Sends heartbeats, and fails streams when the connection or the engine is gone."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(self._heartbeat_s)
            now = time.monotonic()
            if now - asleep > self._heartbeat_s + _LATE_S:
                # This process was busy, and the engine's messages of that time are still unread.
                self.liveness.start()
                self._lost_at = None if self._lost_at is None else now
            if self.connected:
                self._send_soon(wire.Heartbeat())
            elif now - self._hello_at > HELLO_RETRY_S:
                self._send_hello()
            if self._lost_at is not None and now - self._lost_at > self._grace_s:
                self._fail_all(f"the connection broke and did not return in {self._grace_s:g} s")
            if self.liveness.silence_s > self._silence_s:
                self._connected.clear()
                self._fail_all(f"the engine was silent for {self._silence_s:g} s")

    async def _watch_connection(self, monitor: Any) -> None:
        """Notices a killed engine at once, by its broken connection."""
        while True:
            problem = client_problem(await monitor.recv_multipart())
            if problem is not None:
                if problem and problem != self.problem:
                    log.error("%s: %s", self.address, problem)
                self.problem = problem
                continue
            self._connected.clear()
            if self._lost_at is None:
                self._lost_at = time.monotonic()
            self._send_hello()
