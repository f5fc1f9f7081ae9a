"""The authorities that HTTP clients trust, read once for all clients of the tests."""

import os
import ssl
from collections.abc import Callable
from functools import cache
from typing import Any


def read_once(made: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """In place of httpx's own function `made`: every client, of every single `httpx.get`, would read and
    parse them anew, for 0.1 s of CPU, though nearly all talk to a server without TLS on this machine."""

    @cache
    def _usual(_file: str | None, _folder: str | None) -> ssl.SSLContext:
        return made()

    def _context(
        verify: ssl.SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True
    ) -> ssl.SSLContext:
        if verify is not True or cert is not None or not trust_env:
            return made(verify=verify, cert=cert, trust_env=trust_env)
        return _usual(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    return _context
