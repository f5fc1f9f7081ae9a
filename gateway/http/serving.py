"""One gateway process on a listening socket: uvicorn with uvloop and httptools, graceful shutdown."""

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from core.errors import SettingError
from core.settings import Settings
from gateway.app import create_app, create_metrics_app
from gateway.http import memory
from gateway.http.http_protocol import BoundedHttp
from gateway.wiring import build

_BACKLOG = 2048
# Seconds that a thread waits for the GIL after a system call. The default of 5 ms is as long as
# five responses take.
_SWITCH_INTERVAL_S = 0.0005
# New objects between two garbage collections: a request makes hundreds, hardly any in a cycle.
_GC_THRESHOLD = 20_000


def listen(settings: Settings) -> socket.socket:
    """Bind and listen. Raises SettingError if the port is in use, with a command that uses another."""
    try:
        return _bound(settings.host, settings.port)
    except OSError as error:
        raise _cannot_listen(settings, error) from None


def listen_for_metrics(settings: Settings) -> socket.socket | None:
    """On TOLLHOUSE_METRICS_LISTEN, if it is set."""
    if settings.metrics_address is None:
        return None
    try:
        return _bound(*settings.metrics_address)
    except OSError as error:
        raise SettingError(
            f"Cannot listen on {settings.metrics_listen}: {error.strerror}.",
            next_step="Set TOLLHOUSE_METRICS_LISTEN to a free address of this machine.",
        ) from None


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only on sockets with an explicit protocol; with it, each
    # response on a kept-alive connection waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(_BACKLOG)
    listener.set_inheritable(True)
    return listener


def url_of(listener: socket.socket, host: str) -> str:
    """The URL with the port in use. A wildcard address is shown as the loopback address."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return (
        f"http://[{shown}]:{port}"
        if ":" in shown and "[" not in shown
        else f"http://{shown}:{port}"
    )


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
    services = build(settings)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    config = _config(create_app(services), max(1, round(settings.drain_timeout_s)))
    beside = None
    if metrics_listener is not None:
        beside = _serve_beside(create_metrics_app(services), metrics_listener)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn re-raises the signal that stopped it; these handlers make that a clean exit.
        signal.signal(number, _ignore)
    server = _Server(config, lambda: setattr(services.pipeline, "draining", True))
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
        backlog=_BACKLOG,
    )


class _MetricsServer(uvicorn.Server):
    """Leaves signals to the gateway's server, beside which it runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_beside(app: FastAPI, listener: socket.socket) -> None:
    await _MetricsServer(_config(app, 1)).serve(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: object) -> None:
        self._on_stop()
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def _ignore(number: int, frame: FrameType | None) -> None:
    return


async def _serve(
    server: uvicorn.Server,
    listener: socket.socket,
    beside: Coroutine[Any, Any, None] | None,
    ready: Callable[[], None] | None,
    parent: int | None,
) -> None:
    memory.bound_threads(asyncio.get_running_loop())
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
    # Objects from startup live as long as the process: exempt them from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
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


def _cannot_listen(settings: Settings, error: OSError) -> SettingError:
    if error.errno == errno.EADDRINUSE:
        return SettingError(
            f"Port {settings.port} on {settings.host} is already in use.",
            next_step=f"Use another port: tollhouse serve --port {settings.port + 1}",
        )
    return SettingError(
        f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}.",
        next_step="Correct TOLLHOUSE_HOST or TOLLHOUSE_PORT.",
    )
