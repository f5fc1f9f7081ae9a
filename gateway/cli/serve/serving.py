"""One gateway process on a listening socket: uvicorn with uvloop and httptools, graceful shutdown."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from core import collector
from core.settings import Settings
from gateway.answers.deadlines import shutting_down
from gateway.app import create_app, create_metrics_app
from gateway.edge import memory
from gateway.edge.http_protocol import BoundedHttp
from gateway.edge.listening import BACKLOG, DRAIN_QUEUE_S, stop_connecting
from gateway.serving.pipeline import Pipeline
from gateway.wiring import build

# Seconds that a thread waits for the GIL after a system call. The default of 5 ms is as long as
# five responses take.
_SWITCH_INTERVAL_S = 0.0005
_END_S = 8  # for requests that the end of a drain cuts: to settle, and to say so to their clients


def serve_on(
    listener: socket.socket,
    settings: Settings,
    *,
    metrics_listener: socket.socket | None = None,
    ready: Callable[[], None] | None = None,
    parent: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; running streams get `drain_timeout_s` to finish.

    `ready` is called in a thread once the server accepts requests. When the process `parent` ends,
    this one does too."""
    memory.bound_arenas()
    with collector.paused():
        services = build(settings)
        app = create_app(services)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    config = _config(app, max(1, round(settings.drain_timeout_s)) + _END_S)
    beside = None
    if metrics_listener is not None:
        beside = _serve_beside(create_metrics_app(services), metrics_listener)
    server = Server(config, services.pipeline, settings.drain_timeout_s, settings.drain_delay_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        # One that comes before the server listens stops it then. uvicorn raises the signal that
        # stopped it again, which these handlers make a clean exit.
        signal.signal(number, server.handle_early)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(server, listener, beside, ready, parent))


def _config(app: FastAPI, drain_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the protocol resolves them, for the direct path too
        timeout_graceful_shutdown=drain_s,
        timeout_keep_alive=75,
        backlog=BACKLOG,
    )


class _MetricsServer(uvicorn.Server):
    """Leaves signals to the gateway's server, beside which it runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_beside(app: FastAPI, listener: socket.socket) -> None:
    await _MetricsServer(_config(app, 1)).serve(sockets=[listener])


class Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, pipeline: Pipeline, drain_s: float, delay_s: float = 0.0
    ) -> None:
        super().__init__(config)
        self._pipeline = pipeline
        self._drain_s = drain_s
        self._delay_s = delay_s
        self._leaves_at: float | None = None
        self.listener: socket.socket | None = None  # if it is this process's alone
        self._early: int | None = None  # a signal that came before the server listened

    def handle_early(self, sig: int, frame: FrameType | None) -> None:
        self._early = sig

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and self._delay_s and not self._pipeline.leaving:
            self._pipeline.leaving = True
            self._leaves_at = time.monotonic() + self._delay_s
            self.config.encoded_headers.append((b"connection", b"close"))
            self.server_state.default_headers = [
                *self.server_state.default_headers,
                (b"connection", b"close"),
            ]
            return
        self._pipeline.draining = True
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self._early is not None:
            early, self._early = self._early, None
            self.handle_exit(early, None)
        left_s = float("inf") if self._leaves_at is None else self._leaves_at - time.monotonic()
        if left_s <= DRAIN_QUEUE_S and self.listener is not None:
            stop_connecting(self.listener)
            self.listener = None
        if left_s <= 0:
            self._leaves_at = None
            self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)

    def _end_running(self) -> None:
        self._pipeline.responses.deadlines.end(shutting_down())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What still runs after the drain ends with an error, before uvicorn cancels it."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._drain_s, self._end_running)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


async def _serve(
    server: Server,
    listener: socket.socket,
    beside: Coroutine[Any, Any, None] | None,
    ready: Callable[[], None] | None,
    parent: int | None,
) -> None:
    memory.bound_threads(asyncio.get_running_loop())
    server.listener = listener if parent is None else None
    # Its connections, which have this from it, may linger without keeping the next start from the port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tasks = [
        asyncio.create_task(_watch(server, ready, parent)),
        asyncio.create_task(memory.keep_trimmed(lambda: len(server.server_state.tasks))),
    ]
    if beside is not None:
        tasks.append(asyncio.create_task(beside))
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(
    server: uvicorn.Server, ready: Callable[[], None] | None, parent: int | None
) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    collector.spare_all()
    if ready is not None:
        try:
            await asyncio.to_thread(ready)
        except BaseException:
            server.should_exit = True
            raise
    while parent is not None:
        await asyncio.sleep(0.5)
        if os.getppid() != parent:
            server.handle_exit(signal.SIGTERM, None)
            return
