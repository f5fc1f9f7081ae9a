"""A socket that stops: who is connected is served, nobody else connects, and nobody is reset."""

import socket

import pytest

from gateway.edge.listening import stop_connecting


def test_what_is_connected_is_accepted_and_nobody_else_connects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        waiting = socket.create_connection(address, 60)
        waiting.sendall(b"request")
        stop_connecting(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, 0.3)
        listener.settimeout(60)
        accepted, _ = listener.accept()
        assert accepted.recv(7) == b"request"
        accepted.sendall(b"answer")
        with pytest.raises(TimeoutError):
            listener.settimeout(0.1)
            listener.accept()
    assert waiting.recv(6) == b"answer"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 60)
    accepted.close()
    waiting.close()
