"""The connected gateways: the connection of each, and when it last sent a message."""

import logging
from dataclasses import dataclass
from typing import Any

import zmq

from engine.worker import wire

log = logging.getLogger("tollhouse.engine")


@dataclass(slots=True)
class Gateway:
    gateway_id: str
    route: bytes  # ZeroMQ's routing id of the connection; changes at a reconnect
    last_heard: float
    sent: int = 0  # number of messages sent to it so far
    kv_events: bool = False


class Gateways:
    """Sessions by gateway id and by connection; sends messages to them."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._by_id: dict[str, Gateway] = {}
        self._by_route: dict[bytes, Gateway] = {}
        self.unreachable: list[Gateway] = []  # gateways to which a send failed

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Any:
        return iter(list(self._by_id.values()))

    def by_route(self, route: bytes) -> Gateway | None:
        return self._by_route.get(route)

    def by_id(self, gateway_id: str) -> Gateway | None:
        return self._by_id.get(gateway_id)

    def register(self, gateway_id: str, route: bytes, now: float) -> Gateway:
        """The session of this gateway, moved to the connection of its latest Hello."""
        gateway = self._by_id.get(gateway_id)
        if gateway is None:
            gateway = self._by_id[gateway_id] = Gateway(gateway_id, route, now)
        elif gateway.route != route:
            self._by_route.pop(gateway.route, None)
        gateway.route, gateway.last_heard = route, now
        self._by_route[route] = gateway
        return gateway

    def drop(self, gateway: Gateway) -> None:
        self._by_id.pop(gateway.gateway_id, None)
        self._by_route.pop(gateway.route, None)

    def send(self, gateway: Gateway, record: Any) -> None:
        """Never blocks. A gateway that cannot be sent to is added to `unreachable`."""
        try:
            data = wire.encode(record, gateway.sent + 1)
            self._socket.send_multipart([gateway.route, data], zmq.NOBLOCK)
            gateway.sent += 1
        except (zmq.Again, zmq.ZMQError) as error:
            log.warning("gateway %s cannot be reached: %s", gateway.gateway_id, error)
            if gateway not in self.unreachable:
                self.unreachable.append(gateway)

    def send_identify(self, route: bytes) -> None:
        try:
            self._socket.send_multipart([route, wire.encode(wire.Identify())], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            log.warning("a connection closed before it sent a Hello")
