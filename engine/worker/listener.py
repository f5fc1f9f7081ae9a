"""The engine's listening socket, with CURVE if the settings ask for it."""

import os

import zmq

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.worker.curve import enable_curve
from engine.worker.handshakes import RefusedHandshakes

MAX_QUEUED = 100_000  # messages queued to or from one gateway before it counts as unreachable


class Listener:
    def __init__(self, config: EngineConfig) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self._authenticator = None
        self.refused: RefusedHandshakes | None = None
        try:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
            self.socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            self.socket.setsockopt(zmq.LINGER, 1000)
            # Answered by the gateway's I/O thread, which no busy event loop delays. The connection of
            # a gateway that does not answer closes, and the next load report finds it unreachable.
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, round(config.heartbeat_s * 1000))
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(config.gateway_timeout_s * 1000))
            self._authenticator = enable_curve(self._context, self.socket, config)
            self.refused = RefusedHandshakes(self.socket)
            self._bind(config.listen)
        except BaseException:
            self.close()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, address: str) -> None:
        previous = os.umask(0o077)  # only this user may connect to an ipc socket
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise EngineError(
                "cannot_listen", f"cannot listen on {address}: {error}; choose another address"
            ) from error
        finally:
            os.umask(previous)

    def close(self) -> None:
        if self.refused is not None:
            self.refused.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self.socket.close()
        self._context.term()
