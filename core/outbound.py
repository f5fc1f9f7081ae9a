"""HTTP to URLs that a tenant configured: public addresses only, pinned, without redirects, and with a
deadline for the whole exchange.

The host name is resolved once and the connection goes to the checked address, which prevents DNS
rebinding.
"""

import http.client
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from core.database import check_no_transaction
from core.errors import BadRequest, Unavailable

_MAX_READ_BYTES = 65_536
_REFUSED = "address_refused"
_AGAIN_S = 0.2
_LOOK_UP_S = 5.0
_PORTS = {"http": 80, "https": 443}
# Site-local addresses (RFC 3879) and the anycast of 6to4 relays (RFC 7526): deprecated, never the public
# Internet, and global to `ipaddress`.
_NOT_PUBLIC = (ipaddress.ip_network("fec0::/10"), ipaddress.ip_network("192.88.99.0/24"))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # of an IPv4 address in its last 32 bits (RFC 6052)


def check_address(url: str) -> None:
    """BadRequest if the URL is malformed."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    without_credentials = parts.hostname and parts.username is None and parts.password is None
    if parts.scheme not in _PORTS or not without_credentials or port == -1 or not url.isprintable():
        raise BadRequest(
            f"{url[:80]!r} is not a valid webhook URL.",
            next_step="Use https://host/path, without a user name or password.",
            param="webhooks",
        )


def check_public(url: str, private: Sequence[str] = ()) -> None:
    """BadRequest if the host has an address that is not allowed. A name that cannot be resolved now may
    exist later, and is resolved again whenever something is sent."""
    parts = urlsplit(url)
    try:
        _resolve(parts.hostname or "", parts.port or _PORTS[parts.scheme], private)
    except Unavailable as error:
        if error.code == _REFUSED:
            raise BadRequest(
                f"{url[:80]!r} leads to a private address. {error.message}",
                next_step=error.next_step,
                param="webhooks",
                code=_REFUSED,
            ) from None


def encode_json(body: Any) -> bytes:
    """The body exactly as `post_json` sends it, for signing."""
    return json.dumps(body).encode()


def post_json(
    url: str,
    body: Any,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    private: Sequence[str] = (),
) -> int:
    """Returns the HTTP status of the response. `timeout_s` is the limit of the whole exchange, however
    slowly its bytes come. `private` lists private networks (CIDR) that the operator allows. Unavailable
    if the address is not allowed, cannot be reached or takes longer. Not for use in a transaction."""
    check_no_transaction("an HTTP request")
    check_address(url)
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    address = _resolve(host, port, private)
    connection = _PinnedConnection(host, port, address, timeout_s, secure=parts.scheme == "https")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    all_headers = {"content-type": "application/json", "user-agent": "tollhouse", **headers}
    is_late = False
    try:
        with hang_up_after(timeout_s, lambda: connection.sock) as deadline:
            try:
                connection.request("POST", path, encode_json(body), all_headers)
                response = connection.getresponse()
                response.read(_MAX_READ_BYTES)
            finally:
                is_late = deadline.is_over
        if not is_late:
            return response.status
        raise TimeoutError
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        if is_late or isinstance(error, TimeoutError):
            reason = f"no complete response in {timeout_s:g} s"
        raise Unavailable(
            f"{host} does not answer: {reason}.",
            next_step="Check that the URL is right and its server is running.",
        ) from None
    finally:
        connection.close()


class Deadline:
    def __init__(self) -> None:
        self.is_over = False


@contextmanager
def hang_up_after(
    seconds: float, connection: Callable[[], socket.socket | None]
) -> Iterator[Deadline]:
    """Shuts the connection down when the body of the `with` has taken so long: a time-out of a socket
    begins again with each byte, so a peer that sends one at a time would never reach it."""
    deadline, ended = Deadline(), threading.Event()

    def _watch() -> None:
        wait_s = seconds
        while not ended.wait(wait_s):
            deadline.is_over, wait_s = (
                True,
                _AGAIN_S,
            )  # the connection may be one that opens just now
            open_socket = connection()
            if open_socket is not None:
                with suppress(OSError):  # it is closed already
                    # Not SSLSocket's own method, which takes away what the other thread reads with.
                    socket.socket.shutdown(open_socket, socket.SHUT_RDWR)

    watcher = threading.Thread(target=_watch, name="tollhouse-deadline", daemon=True)
    watcher.start()
    try:
        yield deadline
    finally:
        ended.set()


def is_public(address: str, private: Sequence[str] = ()) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    effective = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None) or ip
    if effective.version == 6 and effective in _NAT64:
        effective = ipaddress.IPv4Address(int(effective) & 0xFFFF_FFFF)
    if any(effective in ipaddress.ip_network(network) for network in private):
        return True
    if any(effective in network for network in _NOT_PUBLIC if network.version == effective.version):
        return False
    return bool(effective.is_global and not effective.is_multicast and not effective.is_reserved)


def _resolve(host: str, port: int, private: Sequence[str]) -> str:
    """The first address of the host. Unavailable if any of its addresses is not allowed."""
    check_no_transaction("a look-up of a host name")
    try:
        entries = _looked_up(host, port)
    except (OSError, UnicodeError):
        raise Unavailable(
            f"{host[:80]} cannot be resolved.", next_step="Check the host name of the URL."
        ) from None
    addresses = [str(entry[4][0]) for entry in entries]
    if not addresses or not all(is_public(each, private) for each in addresses):
        raise Unavailable(
            f"{host[:80]} does not resolve to public addresses only.",
            next_step="The operator can allow a network with TOLLHOUSE_WEBHOOK_NETWORKS.",
            code=_REFUSED,
        )
    return addresses[0]


def _looked_up(host: str, port: int) -> list[Any]:
    """As `getaddrinfo`, but not longer than `_LOOK_UP_S`: a tenant's own name server may take minutes.
    Each look-up has a thread, so that slow ones delay no other."""
    found: Future[list[Any]] = Future()

    def _look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=_look_up, name="tollhouse-look-up", daemon=True).start()
    return found.result(_LOOK_UP_S)


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to the given address and does not resolve the name again."""

    def __init__(
        self, host: str, port: int, address: str, timeout_s: float, *, secure: bool
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._address = address
        self._secure = secure

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._secure:
            context = ssl.create_default_context()
            secure = context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock = secure  # before the handshake, so that a deadline can end it
            secure.do_handshake()
