"""The engine's listening socket, with CURVE if the settings ask for it."""

import os

import zmq

from engine.config import EngineConfig
from engine.curve import guard
from engine.errors import EngineError

QUEUED = 100_000  # messages queued to or from one gateway before it counts as unreachable


class Listener:
    def __init__(self, config: EngineConfig) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self._guard = None
        try:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.socket.setsockopt(zmq.SNDHWM, QUEUED)
            self.socket.setsockopt(zmq.RCVHWM, QUEUED)
            self.socket.setsockopt(zmq.LINGER, 1000)
            self._guard = guard(self._context, self.socket, config)
            self._bind(config.listen)
        except BaseException:
            self.close()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, address: str) -> None:
        before = os.umask(0o077)  # only this user may connect to an ipc socket
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise EngineError(
                "cannot_listen", f"cannot listen on {address}: {error}; choose another address"
            ) from error
        finally:
            os.umask(before)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        self.socket.close()
        self._context.term()
