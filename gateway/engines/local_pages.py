"""The /metrics of the engines that this machine's `serve` started, as a part of the gateway's page.

They have no port of their own. All gateway processes read them from a Unix socket next to the engine's,
so that one scrape of any of them shows each engine once.
"""

import logging
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException

log = logging.getLogger("tollhouse.engine")
_IPC = "ipc://"
_SUFFIX = ".metrics"
_TIMEOUT_S = 2.0  # an engine that does not answer must not cost the scrape


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def socket_of(address: str) -> str:
    """Where the engine that listens at `ipc://…` serves /metrics."""
    return address.removeprefix(_IPC) + _SUFFIX


def page(addresses: Mapping[str, str]) -> str:
    """Of the engines at `ipc://` addresses, by name. One that does not answer is left out."""
    local = {name: each for name, each in addresses.items() if each.startswith(_IPC)}
    if not local:
        return ""
    with ThreadPoolExecutor(len(local)) as pool:
        texts = dict(zip(local, pool.map(_read, local.values()), strict=True))
    return merged({name: text for name, text in texts.items() if text})


def merged(texts: Mapping[str, str]) -> str:
    """One page of several, where each sample has the label `engine`; a family has one head."""
    families: dict[str, list[str]] = {}
    for name, text in texts.items():
        for lines in _families(text.splitlines()):
            head, samples = lines[:2], lines[2:]
            family = families.setdefault(head[1], head)
            family += [_labelled(line, name) for line in samples]
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _families(lines: Iterable[str]) -> list[list[str]]:
    """Each with its lines HELP and TYPE first, as engines write them."""
    found: list[list[str]] = []
    for line in lines:
        if line.startswith("# HELP "):
            found.append([])
        found[-1].append(line)
    return found


def _labelled(line: str, engine: str) -> str:
    name, _, rest = line.partition("{")
    shown = engine.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}{{engine="{shown}",{rest}'


def _read(address: str) -> str:
    path = socket_of(address)
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.read().decode() if answer.status == 200 else ""
    except (OSError, HTTPException) as error:
        log.warning("the engine at %s does not show its metrics: %s", address, error)
        return ""
    finally:
        connection.close()
