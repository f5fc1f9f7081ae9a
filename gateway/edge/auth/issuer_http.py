"""HTTP to the issuer of single sign-on, with a deadline for a whole exchange and a bound of its answer.

A time-out of `requests` begins again with each byte, so an issuer that sends one at a time would keep a
thread, and everybody's sign-in, for as long as it likes; and one that sends without end would fill the
memory, whoever chose it. Through a proxy (HTTPS_PROXY) only that holds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from core.outbound import hang_up_after, is_public

_MOST_BYTES = 1 << 20  # of an answer, unpacked
_PIECE_BYTES = 1 << 14


@contextmanager
def limited(
    session: requests.Session, timeout_s: float, networks: Sequence[str] | None = None
) -> Iterator[None]:
    """The session's exchanges in the `with` end after `timeout_s`, or beyond a megabyte, with a
    requests.RequestException. With
    `networks`, only public addresses and these networks are reached, whatever a name resolves to."""
    opened: list[HTTPConnection] = []

    class Plain(HTTPConnection):
        def connect(self) -> None:
            opened.append(self)
            super().connect()
            _check(self, networks)

    class Secure(HTTPSConnection):
        def connect(self) -> None:
            opened.append(self)
            super().connect()
            _check(self, networks)

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **named: Any) -> None:
            super().init_poolmanager(*arguments, **named)
            self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}

        def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
            answer = super().build_response(req, resp)
            # Kept as `Response.content` keeps it, which would read all there is.
            answer._content, answer._content_consumed = _body_of(answer), True
            return answer

    session.trust_env = networks is None  # through a proxy, nobody sees the address
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    with hang_up_after(timeout_s, lambda: opened[-1].sock if opened else None):
        yield


def _body_of(answer: requests.Response) -> bytes:
    body = bytearray()
    for piece in answer.iter_content(_PIECE_BYTES):
        body += piece
        if len(body) > _MOST_BYTES:
            answer.close()
            raise requests.ConnectionError(f"the issuer's answer is over {_MOST_BYTES} bytes")
    return bytes(body)


def _check(connection: HTTPConnection, networks: Sequence[str] | None) -> None:
    """Before anything is sent. An OSError becomes a requests.ConnectionError."""
    if networks is None or connection.sock is None:
        return
    address = str(connection.sock.getpeername()[0])
    if not is_public(address, networks):
        connection.close()
        raise OSError(f"{address} is not a public address")
