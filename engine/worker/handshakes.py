"""Why a connection between an engine and a gateway is refused before any message passes.

ZeroMQ retries a refused handshake without a word, so that wrong or missing CURVE keys look like an engine
that still loads. Its monitor's events tell them apart.
"""

import logging
import threading
import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger("tollhouse.engine")
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_LOG_EVERY_S = 60.0
_POLL_MS = 200


def client_problem(frames: list[bytes]) -> str | None:
    """What a gateway's monitor says about its handshake: a problem, "" for a success, None for an event
    that says neither."""
    event = parse_monitor_message(frames)["event"]
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return ""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "the engine does not accept this gateway's CURVE key: add it to its client_keys_file"
    if event & FAILED:
        return (
            "the CURVE handshake fails: the engine has another key than the configured one, or only one "
            "side uses keys"
        )
    return None


class RefusedHandshakes:
    """Counts and logs the connections that a listening socket refuses, from a thread."""

    def __init__(self, socket: "zmq.Socket[Any]") -> None:
        self.count = 0
        self._socket = socket
        self._monitor = socket.get_monitor_socket(FAILED)
        self._stopping = threading.Event()
        self._said_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="handshakes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call it before the socket closes."""
        self._stopping.set()
        self._thread.join(5)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._monitor.poll(_POLL_MS):
                continue
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self.count += 1
            now = time.monotonic()
            if now - self._said_at < _LOG_EVERY_S:
                continue
            self._said_at = now
            why = "its CURVE key is not in client_keys_file"
            if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                why = "it has another key of this engine, or only one side uses CURVE keys"
            log.warning("a gateway's connection was refused (%d so far): %s", self.count, why)
