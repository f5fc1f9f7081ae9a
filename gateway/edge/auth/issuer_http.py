"""HTTP to the issuer of single sign-on, with a deadline for a whole exchange.

A time-out of `requests` begins again with each byte, so an issuer that sends one at a time would keep a
thread, and everybody's sign-in, for as long as it likes. Through a proxy (HTTPS_PROXY) only that holds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from core.outbound import hang_up_after, is_public


@contextmanager
def limited(
    session: requests.Session, timeout_s: float, networks: Sequence[str] | None = None
) -> Iterator[None]:
    """The session's exchanges in the `with` end after `timeout_s`, with a requests.RequestException. With
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

    session.trust_env = networks is None  # through a proxy, nobody sees the address
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    with hang_up_after(timeout_s, lambda: opened[-1].sock if opened else None):
        yield


def _check(connection: HTTPConnection, networks: Sequence[str] | None) -> None:
    """Before anything is sent. An OSError becomes a requests.ConnectionError."""
    if networks is None or connection.sock is None:
        return
    address = str(connection.sock.getpeername()[0])
    if not is_public(address, networks):
        connection.close()
        raise OSError(f"{address} is not a public address")
