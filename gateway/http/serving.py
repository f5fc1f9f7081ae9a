"""One gateway process on a listening socket: uvicorn with uvloop and httptools, graceful shutdown."""

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from core.errors import SettingError
from core.settings import Settings
from gateway.app import create_app
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
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio disables Nagle's algorithm only on sockets with an explicit protocol; with it, each
    # response on a kept-alive connection waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(settings, error) from None
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
    ready: Callable[[], None] | None = None,
    parent: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; running streams get `drain_timeout_s` to finish.

    `ready` is called in a thread once the server accepts requests. When the process `parent` ends,
    this one does too."""
    memory.bound_arenas()
    services = build(settings)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    config = uvicorn.Config(
        create_app(services),
        loop="uvloop",
        http=BoundedHttp,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the protocol resolves them, for the direct path too
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
        timeout_keep_alive=75,
        backlog=_BACKLOG,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn re-raises the signal that stopped it; these handlers make that a clean exit.
        signal.signal(number, _ignore)
    server = _Server(config, lambda: setattr(services.pipeline, "draining", True))
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(server, listener, ready, parent))


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
    ready: Callable[[], None] | None,
    parent: int | None,
) -> None:
    memory.bound_threads(asyncio.get_running_loop())
    tasks = [
        asyncio.create_task(_watch(server, ready, parent)),
        asyncio.create_task(memory.trim_when_idle(lambda: len(server.server_state.tasks))),
    ]
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
