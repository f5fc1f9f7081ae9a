"""The engine's process: one thread polls the socket, steps the engine and sends its output."""

import importlib
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import zmq

from engine.batch import Runner
from engine.config import EngineConfig
from engine.errors import AdapterError, EngineError, IntegrityError, RankError, RequestError
from engine.extras import imports_of
from engine.loop import Engine
from engine.protocol import AdapterState, GenerateRequest, Refusal, StepOutput
from engine.worker import wire
from engine.worker.beats import Beats
from engine.worker.gateways import Gateway, Gateways
from engine.worker.grammar_queue import GrammarQueue
from engine.worker.listener import Listener
from engine.worker.monitor import Monitor
from engine.worker.options import parse
from engine.worker.threads import bound_spinning, uncollected
from engine.worker.watchdog import Watchdog

log = logging.getLogger("tollhouse.engine")

MESSAGES_PER_TURN = 256  # most messages handled between two steps, so that generation goes on
IDLE_S = 0.25  # longest sleep; the interval at which signals and timers are checked
READ_POLL_S = 0.005  # while an adapter is being read from disk
DRAIN_S = 30.0  # time that running requests get after SIGTERM


class Server:
    """Serves one engine to any number of gateways until `stop`."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.config = config
        self._listener = Listener(config)
        self._socket = self._listener.socket
        self.address = self._listener.address
        self.gateways = Gateways(self._socket)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._runner = runner
        self._grammars = GrammarQueue(runner.prepare_grammar)
        self._step = 0
        self._stop_by: float | None = None
        self._integrity_checked = (
            False  # whether integrity was checked since the engine was last busy
        )
        self._stalled = False  # requests wait, but none could run in the last turn
        self.last_turn = time.monotonic()
        try:
            self.engine = Engine(config, runner, submit=self._loader.submit)
            self.engine.on_begin = self._announce
            self.engine.adapters.host.on_begin = self._announce_read
            self.engine.info = replace(
                self.engine.info,
                engine_id=uuid.uuid4().hex,
                public_prefixes=config.public_prefixes,
            )
            self._stats = self._current_stats()
            shown = config.metrics_port is not None or config.metrics_socket is not None
            self.monitor = Monitor(self) if shown else None
            self._beats = Beats(self._send_last_stats, config.heartbeat_s)
        except BaseException:
            self._listener.close()
            raise

    def stop(self, grace_s: float = DRAIN_S) -> None:
        """Refuse new requests, let running ones finish for `grace_s`, then return from `run`. Safe
        in a signal handler."""
        self._stop_by = time.monotonic() + grace_s

    @property
    def draining(self) -> bool:
        return self._stop_by is not None

    @property
    def refused_handshakes(self) -> int:
        """Connections whose keys were wrong or missing."""
        return self._listener.refused.count if self._listener.refused is not None else 0

    def run(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Serve until `stop`, or until `alive`, which is called regularly, returns False."""
        try:
            while not self._stopped():
                self.turn()
                if not alive() and self._stop_by is None:
                    self.stop(0.0)
        except RankError as error:  # which has been logged, where a rank ended
            log.error("the engine stops: %s", error.message)
            self.engine.abandon(f"the engine stopped: {error.message}")
            self._send_outputs()
            raise
        except Exception as error:
            log.exception("the engine stops: its state or its device is no longer reliable")
            self.engine.abandon(f"the engine stopped: {error}")
            self._send_outputs()
            raise
        finally:
            self.close()

    def turn(self) -> None:
        """Handle messages, run one step, send outputs and heartbeats; waits while idle."""
        idle = not self._receive(self._poll_timeout_s())
        self.engine.poll()
        self._submit_prepared()
        with self._beats.stepping():
            stepped = self.engine.busy and self.engine.step()
        self._send_outputs()
        self._send_heartbeats()
        self._stalled = self.engine.busy and not stepped
        if self.engine.busy:
            self._integrity_checked = False
        elif idle and not self._integrity_checked:
            # Only while no message arrives: with many blocks the check delays the next request.
            self.engine.check_integrity()
            self._integrity_checked = True
        self.last_turn = time.monotonic()

    def close(self) -> None:
        self._beats.close()
        if self.monitor is not None:
            self.monitor.close()
        self._grammars.close()
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._listener.close()
        self.engine.close()

    def _stopped(self) -> bool:
        if self._stop_by is None:
            return False
        if self.engine.busy and time.monotonic() >= self._stop_by:
            for request_id in list(self.engine.requests):
                self.engine.abort(request_id)
            self.engine.step()
            self._send_outputs()
            return True
        return not self.engine.busy

    def _poll_timeout_s(self) -> float:
        """Seconds to wait for a message now."""
        if self.engine.busy:
            return READ_POLL_S if self._stalled else 0.0
        engine = self.engine
        if engine.adapters.host.reading or engine.tiers.busy or len(self._grammars):
            return READ_POLL_S
        left_s = self._beats.sent_at + self.config.heartbeat_s - time.monotonic()
        return min(IDLE_S, max(0.0, left_s))

    def _receive(self, wait_s: float) -> bool:
        """Handle the messages that arrive within `wait_s`. Whether there were any."""
        if not self._socket.poll(int(wait_s * 1000)):
            self._drop_silent()
            return False
        for _ in range(MESSAGES_PER_TURN):
            try:
                route, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._drop_silent()
                break
            except ValueError:
                log.warning("a message with a wrong number of parts was dropped")
                continue
            try:
                record, _ = wire.decode(data)
                self._handle(route, record)
            except wire.WireError as error:
                self._refuse_unreadable(route, data, error)
        return True

    def _refuse_unreadable(self, route: bytes, data: bytes, error: wire.WireError) -> None:
        log.warning("a message of a gateway was dropped: %s", error)
        gateway, request_id = self.gateways.by_route(route), wire.request_id_of(data)
        if gateway is not None and request_id is not None:
            refusal = Refusal(request_id, "invalid_request", error.message)
            self.gateways.send(gateway, refusal)

    def _handle(self, route: bytes, record: Any) -> None:
        now = time.monotonic()
        if isinstance(record, wire.Hello):
            self._hello(route, record, now)
            return
        gateway = self.gateways.by_route(route)
        if gateway is None:
            if not isinstance(record, wire.Goodbye):
                self.gateways.send_identify(route)
            return
        gateway.last_heard = now
        match record:
            case wire.Generate(request):
                self._generate(gateway, request)
            case wire.Abort(request_ids):
                self._abort(gateway, request_ids)
            case wire.Acknowledge(request_ids):
                self.engine.receipts.acknowledge(request_ids, gateway.gateway_id)
            case wire.LoadAdapter(call, path):
                then = partial(self._adapter_read, gateway.gateway_id, call, path)
                self.engine.adapters.host.read(path, then)
            case wire.UnloadAdapter(call, digest):
                self._unload(gateway, call, digest)
            case wire.LookUp(call, request_ids):
                self._look_up(gateway, call, request_ids)
            case wire.Goodbye():
                self._disconnect(gateway, "said goodbye")
            case wire.Heartbeat():
                pass
            case _:
                log.warning(
                    "gateway %s sent an unexpected %s", gateway.gateway_id, type(record).__name__
                )

    def _hello(self, route: bytes, hello: wire.Hello, now: float) -> None:
        if hello.version != wire.VERSION:
            log.error(
                "gateway %s uses protocol version %d, this engine %d: update one of them",
                hello.gateway_id,
                hello.version,
                wire.VERSION,
            )
            return
        known = self.gateways.by_id(hello.gateway_id)
        moved = known is not None and known.route != route
        if known is not None and moved and hello.seen != known.sent:
            log.warning("gateway %s missed messages: its requests are ended", hello.gateway_id)
            self.engine.abort_origin(hello.gateway_id)
            self.engine.discard_outbox(hello.gateway_id)
        gateway = self.gateways.register(hello.gateway_id, route, now)
        gateway.kv_events = hello.kv_events
        if hello.kv_events and self.engine.pool.events is None:
            self.engine.pool.events = []
        under_way = self.engine.under_way(hello.gateway_id)
        under_way += [each.request.request_id for each in self._grammars.find(hello.gateway_id)]
        welcome = wire.Welcome(
            info=self.engine.info,
            stats=self._current_stats(),
            receipts=self.engine.receipts.of(hello.gateway_id),
            under_way=under_way,
            number=gateway.sent + 1,
            attempt=hello.attempt,
        )
        self.gateways.send(gateway, welcome)
        events = self.engine.tiers.residency() if hello.kv_events else []
        if events:
            self.gateways.send(gateway, wire.KvEvents(events))

    def _generate(
        self, gateway: Gateway, request: GenerateRequest, *, prepared: bool = False
    ) -> None:
        try:
            if self._stop_by is not None:
                raise RequestError("draining", "the engine is shutting down: use another engine")
            grammar = request.sampling.grammar
            if grammar is None or prepared or self._runner.grammar_ready(grammar):
                self.engine.submit(request, gateway.gateway_id)
            else:
                self._grammars.add(gateway.gateway_id, request)
        except (RequestError, AdapterError) as error:
            self.gateways.send(gateway, Refusal(request.request_id, error.code, error.message))
        except IntegrityError:
            raise
        except Exception as error:
            log.exception("request %s could not be queued", request.request_id)
            self.gateways.send(gateway, Refusal(request.request_id, "internal", str(error)))

    def _submit_prepared(self) -> None:
        """Submit a request whose grammar has been compiled."""
        pending = self._grammars.take()
        gateway = self.gateways.by_id(pending.gateway_id) if pending is not None else None
        if pending is None or gateway is None:
            return
        request, error = pending.request, pending.error
        if error is not None:
            self.engine.metrics.refuse(error.code)
            self.gateways.send(gateway, Refusal(request.request_id, error.code, error.message))
            return
        self._generate(gateway, request, prepared=True)
        if pending.aborted:
            self.engine.abort(request.request_id, gateway.gateway_id)

    def _abort(self, gateway: Gateway, request_ids: list[str]) -> None:
        for pending in self._grammars.find(gateway.gateway_id) if len(self._grammars) else ():
            pending.aborted |= pending.request.request_id in request_ids
        for request_id in request_ids:
            self.engine.abort(request_id, gateway.gateway_id)

    def _unload(self, gateway: Gateway, call: int, digest: str) -> None:
        try:
            reply = wire.AdapterReply(call, self.engine.unload_adapter(digest))
        except AdapterError as error:
            reply = wire.AdapterReply(call, None, error.code, error.message)
        self.gateways.send(gateway, reply)

    def _look_up(self, gateway: Gateway, call: int, request_ids: list[str]) -> None:
        receipts, reader = self.engine.receipts, gateway.gateway_id
        found = [r for i in request_ids if (r := receipts.find(i, reader)) is not None]
        done = {receipt.request_id for receipt in found}
        held = self.engine.requests.keys() | self.engine.searches.keys()
        under_way = [i for i in request_ids if i in held and i not in done]
        self.gateways.send(gateway, wire.LookUpReply(call, found, under_way))

    def _adapter_read(
        self, gateway_id: str, call: int, path: str, read: "Future[AdapterState]"
    ) -> None:
        try:
            reply = wire.AdapterReply(call, self.engine.add_adapter(path, read.result()))
        except EngineError as error:
            reply = wire.AdapterReply(call, None, error.code, error.message)
        except Exception as error:
            log.exception("reading the adapter in %s failed", path)
            reply = wire.AdapterReply(call, None, "adapter_unreadable", f"{path}: {error}")
        gateway = self.gateways.by_id(gateway_id)
        if gateway is not None:
            self.gateways.send(gateway, reply)

    def _announce(self, begun: dict[str, list[str]]) -> None:
        """Called inside a step, before its launch."""
        with self._beats.sending():
            for gateway_id, request_ids in begun.items():
                gateway = self.gateways.by_id(gateway_id)
                if gateway is not None:
                    self.gateways.send(gateway, wire.Began(request_ids))

    def _announce_read(self, path: str) -> None:
        for gateway in self.gateways:
            self.gateways.send(gateway, wire.Began([], path))

    def _send_outputs(self) -> None:
        self._step += 1
        for gateway_id, outbox in self.engine.take_outboxes().items():
            gateway = self.gateways.by_id(gateway_id)
            if gateway is not None:
                self.gateways.send(gateway, StepOutput(self._step, outbox.chunks, outbox.receipts))
        events = self.engine.take_events()
        if events:
            for gateway in self.gateways:
                if gateway.kv_events:
                    self.gateways.send(gateway, wire.KvEvents(events))
        unreachable, self.gateways.unreachable = self.gateways.unreachable, []
        for gateway in unreachable:
            self._disconnect(gateway, "cannot be reached")

    def _drop_silent(self) -> None:
        """Ends the requests of gateways whose program hangs while its connection still answers. Call
        it when all messages are read, those that arrived during a long step included."""
        now = time.monotonic()
        for gateway in self.gateways:
            if now - gateway.last_heard > self.config.gateway_stall_s:
                self._disconnect(gateway, "hangs")

    def _send_heartbeats(self) -> None:
        if not self._beats.due:
            return
        self._stats = self._current_stats(changes_only=True)
        for gateway in self.gateways:
            self.gateways.send(gateway, self._stats)
        self._beats.sent_at = time.monotonic()

    def _send_last_stats(self) -> None:
        """During a step only its thread may read the engine: repeat what the last heartbeat said."""
        stats = replace(self._stats, adapters=[], draining=self._stop_by is not None)
        for gateway in self.gateways:
            self.gateways.send(gateway, stats)

    def _disconnect(self, gateway: Gateway, why: str) -> None:
        self.gateways.drop(gateway)
        ended = self.engine.abort_origin(gateway.gateway_id)
        log.info("gateway %s %s: %d requests ended", gateway.gateway_id, why, ended)

    def _current_stats(self, *, changes_only: bool = False) -> Any:
        stats = self.engine.stats(changes_only=changes_only)
        return replace(stats, draining=self._stop_by is not None)


def make_runner(config: EngineConfig, fake: bool) -> Runner:
    if fake:
        from engine.runners.fake import FakeRunner

        return FakeRunner(config)
    with imports_of("engine", "The engine"), uncollected():
        loading = importlib.import_module("engine.runners.cpu.runner")
        starting = importlib.import_module("engine.parallel.start") if config.tp > 1 else None
    runner: Runner = (
        loading.load_runner(config) if starting is None else starting.start_ranks(config)
    )
    return runner


def serve(
    config: EngineConfig,
    *,
    fake: bool = False,
    exit_with_parent: bool = False,
    report_alive: bool = False,
) -> None:
    """Load the model and serve until SIGTERM or SIGINT. Prints one JSON line when ready."""
    parent = os.getppid()
    if config.tp > 1:  # while they load, an end of this process ends them in order
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runner = make_runner(config, fake)
    ranks: Any = runner if config.tp > 1 and not fake else None

    def alive() -> bool:
        if ranks is not None:
            ranks.check()  # a rank that ends while nothing runs stops the engine too
        return not exit_with_parent or os.getppid() == parent

    try:
        _run(Server(config, runner), alive, report_alive)
    finally:
        if ranks is not None:
            ranks.close()


def _run(server: Server, alive: Callable[[], bool], report_alive: bool) -> None:
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, lambda *_: server.stop(0.0))
    info = server.engine.info
    ready = {
        "event": "ready",
        "address": server.address,
        "engine_id": info.engine_id,
        "model": info.model,
        "metrics": server.monitor.url if server.monitor else None,
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    watchdog = Watchdog(lambda: server.last_turn, server.config.stall_s, report=report_alive)
    try:
        server.run(alive)
    finally:
        watchdog.close()


def main(argv: list[str] | None = None) -> int:
    bound_spinning()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        options = parse(argv)
        serve(
            options.config,
            fake=options.fake,
            exit_with_parent=options.exit_with_parent,
            report_alive=options.report_alive,
        )
    except EngineError as error:
        sys.stderr.write(f"tollhouse engine: {error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
