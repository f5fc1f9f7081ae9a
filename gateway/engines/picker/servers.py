"""The model servers of a pool: who they are, whether they answer, and what their pages report."""

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import aiohttp
import orjson

from core.errors import SettingError
from engine.protocol import AdapterState, EngineStats
from gateway.engines.openai_stats import stats_of
from gateway.engines.routing.placement import ReplicaSnapshot
from gateway.engines.server_kinds import read_page

log = logging.getLogger("tollhouse.picker")
_EVERY_S = 0.5
_PAGE_S = 2.0  # without an answer for longer, a server counts as away
_MODELS_EVERY = 10  # looks at the metrics for each look at the list of models
_LORA = re.compile(r"^vllm:lora_requests_info\{([^}]*)\} (\S+)$", re.MULTILINE)
_NAMES = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')

Members = Callable[[], Awaitable[frozenset[str]]]


@dataclass(slots=True, eq=False)
class Server:
    """One server of the pool. Tokens are estimates of prompts that this picker sent there."""

    address: str  # ip:port
    healthy: bool = False
    stats: EngineStats | None = None
    models: frozenset[str] = frozenset()  # empty: not known
    adapters: dict[str, AdapterState] = field(default_factory=dict)  # by the name of the model
    under_way: int = 0
    unreported: int = 0  # tokens sent since the server last reported its queue

    def snapshot(self, held_blocks: int, block_tokens: int) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            self.address,
            self.stats,
            block_tokens,
            queue_correction_tokens=self.unreported,
            held_blocks=held_blocks,
            under_way=self.under_way,
            adapters=self.adapters,
        )

    def saturated(self, queue_limit: int) -> bool:
        """Whether a request that can be refused should not go there."""
        stats = self.stats
        if stats is None:
            return False
        full = stats.blocks_total > 0 and stats.blocks_free < 0.05 * stats.blocks_total
        return full or stats.waiting >= queue_limit

    def cached_tokens(self) -> int:
        """What its cache can hold; 0 where it does not say so."""
        return self.stats.blocks_total * 16 if self.stats is not None else 0


class Servers:
    """Follows the members of the pool and reads their pages, until it is closed."""

    def __init__(self, members: Members, on_gone: Callable[[str], None]) -> None:
        """`on_gone` gets the address of a server that has left the pool or does not answer."""
        self._members, self._on_gone = members, on_gone
        self._known: dict[str, Server] = {}
        self._task: asyncio.Task[None] | None = None
        self._looks = 0

    def ready(self) -> list[Server]:
        return [server for server in self._known.values() if server.healthy]

    def of(self, address: str) -> Server | None:
        return self._known.get(address)

    async def start(self) -> None:
        """Returns after the first look at every server."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PAGE_S))
        await self.look()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._session.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.look()
            except Exception as error:  # of a list of members that cannot be read now
                log.warning("the members of the pool are not known; the last ones stay: %s", error)

    async def look(self) -> None:
        members = await self._members()
        for address in self._known.keys() - members:
            del self._known[address]
            self._on_gone(address)
        for address in members - self._known.keys():
            self._known[address] = Server(address)
        await asyncio.gather(*(self._read(server) for server in self._known.values()))
        self._looks += 1

    async def _read(self, server: Server) -> None:
        sent = server.unreported
        try:
            page = await self._page(server, "/metrics")
            if self._looks % _MODELS_EVERY == 0 or not server.models:
                server.models = _models_of(await self._page(server, "/v1/models"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if server.healthy:
                log.warning("%s does not answer: %s", server.address, error or type(error).__name__)
                self._on_gone(server.address)
            server.healthy, server.stats, server.models = False, None, frozenset()
            return
        server.stats = stats_of(page)
        server.adapters = {name: AdapterState(name, "resident", 0, 0) for name in adapters_of(page)}
        server.unreported -= sent
        server.healthy = True

    async def _page(self, server: Server, path: str) -> str:
        async with self._session.get(f"http://{server.address}{path}") as answer:
            if answer.status == 404:  # a server without this page can still answer requests
                return ""
            answer.raise_for_status()
            body = await read_page(answer)
        if body is None:
            raise ValueError(f"{path} is too large")
        return body.decode(errors="replace")


def adapters_of(page: str) -> frozenset[str]:
    """Adapters that a server has in use. The value of the series is the time at which it was written,
    so the largest is the newest."""
    newest, names = -1.0, ""
    for labels, value in _LORA.findall(page):
        try:
            written = float(value)
        except ValueError:
            continue
        if written > newest:
            newest, names = written, ",".join(_NAMES.findall(labels))
    return frozenset(name.strip() for name in names.split(",") if name.strip())


def _models_of(page: str) -> frozenset[str]:
    if not page:
        return frozenset()
    listed = orjson.loads(page)
    data = listed.get("data") if isinstance(listed, dict) else None
    ids = (
        [each.get("id") for each in data if isinstance(each, dict)]
        if isinstance(data, list)
        else []
    )
    return frozenset(each for each in ids if isinstance(each, str))


def fixed(addresses: Iterable[str]) -> Members:
    known = frozenset(checked(each) for each in addresses)

    async def _members() -> frozenset[str]:
        return known

    return _members


def listed_in(path: Path) -> Members:
    """An address a line; `#` begins a comment. The file is read again at every look."""

    async def _members() -> frozenset[str]:
        lines = path.read_text().splitlines()
        texts = (line.partition("#")[0].strip() for line in lines)
        return frozenset(checked(text) for text in texts if text)

    return _members


def resolved(name: str, port: int) -> Members:
    """The addresses of a DNS name, such as a headless Service of Kubernetes."""

    async def _members() -> frozenset[str]:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        return frozenset(_joined(str(address[0]), port) for *_, address in found)

    return _members


def checked(address: str) -> str:
    """As a proxy compares it. SettingError unless it is ip:port."""
    host, colon, port = address.rpartition(":")
    try:
        if not colon or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("it has no port")
        return _joined(str(ip_address(host.strip("[]"))), int(port))
    except ValueError as error:
        raise SettingError(
            f"{address!r} is not the address of a server: {error}.",
            next_step="Give its IP address and port, such as 10.0.0.7:8000 or [fd00::7]:8000.",
        ) from None


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
