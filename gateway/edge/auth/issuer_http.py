"""HTTP to the issuer of single sign-on, with a deadline for a whole exchange.

A time-out of `requests` begins again with each byte, so an issuer that sends one at a time would keep a
thread, and everybody's sign-in, for as long as it likes. Through a proxy (HTTPS_PROXY) only that holds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from core.outbound import hang_up_after


@contextmanager
def limited(session: requests.Session, timeout_s: float) -> Iterator[None]:
    """The session's exchanges in the `with` end after `timeout_s`, with a requests.RequestException."""
    opened: list[HTTPConnection] = []

    class Plain(HTTPConnection):
        def connect(self) -> None:
            opened.append(self)
            super().connect()

    class Secure(HTTPSConnection):
        def connect(self) -> None:
            opened.append(self)
            super().connect()

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **named: Any) -> None:
            super().init_poolmanager(*arguments, **named)
            self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}

    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    with hang_up_after(timeout_s, lambda: opened[-1].sock if opened else None):
        yield
