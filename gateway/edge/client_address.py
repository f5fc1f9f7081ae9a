"""The client of a connection that comes through proxies: the last address in X-Forwarded-For that is
not a trusted proxy. Whatever stands before it is the client's own claim."""

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

RawHeaders = list[tuple[bytes, bytes]]
_MAX_HOPS = 32


class TrustedProxies:
    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(each) for each in networks]
        self._trusts = lru_cache(maxsize=4096)(self._is_trusted)

    def trusts(self, peer: str) -> bool:
        """Whether what the peer says of its client is believed."""
        return bool(self._networks) and self._trusts(peer)

    def client_of(self, peer: str, headers: RawHeaders) -> str:
        """The peer itself unless it is a trusted proxy."""
        if not self.trusts(peer):
            return peer
        chain = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        client = peer
        for hop in reversed(chain.decode("latin-1").split(",")[-_MAX_HOPS:]):
            address = _address(hop.strip())
            if address is None:
                break  # not an address: the proxy before it is the last that is known
            client = address
            if not self._trusts(address):
                break
        return client

    def scheme_of(self, peer: str, headers: RawHeaders, scheme: str) -> str:
        if not self.trusts(peer):
            return scheme
        given = [value for name, value in headers if name == b"x-forwarded-proto"]
        last = given[-1].rpartition(b",")[2].strip().lower() if given else b""
        return last.decode() if last in (b"http", b"https") else scheme

    def _is_trusted(self, address: str) -> bool:
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return any(ip in network for network in self._networks)


def _address(hop: str) -> str | None:
    """The address of a hop such as `203.0.113.7`, `203.0.113.7:80` or `[2001:db8::1]:80`."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ipaddress.ip_address(hop))
    except ValueError:
        return None
