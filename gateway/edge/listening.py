"""The sockets that a gateway listens on, bound before anything is started or imported for it.

A bound socket refuses connections until the server listens, so that nobody waits for a start.
"""

import ctypes
import errno
import socket
import struct
from contextlib import suppress

from core.errors import SettingError
from core.settings import Settings

BACKLOG = 2048
DRAIN_QUEUE_S = 0.5  # for the server to accept what has connected before the socket closes
_SO_ATTACH_FILTER = 26  # of Linux
# Classic BPF on the TCP header: drop a segment with SYN and without ACK, keep any other.
_DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte of the flags
    (0x54, 0, 0, 0x12),  # SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFFFFFF),
)


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


def stop_connecting(listener: socket.socket) -> None:
    """From now on, the kernel completes no new connection. Those that are complete but not accepted are
    reset when a socket closes, perhaps with a request that a proxy does not send twice: let the server
    accept them first. A client that is not connected tries again, and is refused after the close. No
    effect where the system has no such filter."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _DROP_SYN))
    program = struct.pack("HP", len(_DROP_SYN), ctypes.addressof(code))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only on sockets with an explicit protocol; with it, each
    # response on a kept-alive connection waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        _bind(listener, host, port)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(True)
    return listener


def _bind(listener: socket.socket, host: str, port: int) -> None:
    """With connections of an earlier process that linger, only where nothing else has the port: two
    sockets that both reuse addresses could both be bound until one listens."""
    try:
        listener.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))


def url_of(listener: socket.socket, host: str) -> str:
    """The URL with the port in use. A wildcard address is shown as the loopback address."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return (
        f"http://[{shown}]:{port}"
        if ":" in shown and "[" not in shown
        else f"http://{shown}:{port}"
    )


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
