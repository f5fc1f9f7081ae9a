"""Which engine a request goes to, and which adapters each engine must hold."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from core.errors import TollhouseError, Unavailable
from core.events import OpenedRequest
from engine.protocol import Receipt
from gateway.catalog import Target
from gateway.engines.base import EngineClient


class Router:
    """Least loaded healthy engine of the model."""

    def __init__(self, replicas: Mapping[str, Sequence[EngineClient]]) -> None:
        self._replicas = {name: list(clients) for name, clients in replicas.items()}
        self._loaded: set[tuple[str, str]] = set()  # (engine, adapter digest)
        self._settled: list[str] = []
        self._sending: set[asyncio.Future[None]] = set()
        self._load_locks: dict[tuple[str, str], asyncio.Lock] = {}

    def add(self, model: str, clients: Sequence[EngineClient]) -> None:
        self._replicas.setdefault(model, []).extend(clients)

    def engines(self) -> Iterable[EngineClient]:
        seen: dict[int, EngineClient] = {}
        for clients in self._replicas.values():
            seen.update({id(client): client for client in clients})
        return seen.values()

    def choose(self, target: Target, ids: list[int]) -> EngineClient:
        replicas = self._replicas.get(target.model.name, [])
        ready = [client for client in replicas if client.healthy()]
        if not ready:
            raise Unavailable(
                f"No engine of {target.model.name} is ready.",
                next_step="Try again shortly; /readyz says what is missing.",
                code="engine_unavailable",
                retry_after_s=2.0,
            )
        return ready[0] if len(ready) == 1 else min(ready, key=_load)

    async def ensure_adapter(self, client: EngineClient, target: Target) -> None:
        """The adapter is registered with that engine; the first use of one waits for its load."""
        adapter = target.adapter
        if adapter is None:
            return
        info = client.info()
        # A process that started anew knows none of the adapters that its predecessor had.
        key = (info.engine_id if info else client.engine_id, adapter.digest)
        if key in self._loaded:
            return
        async with self._load_locks.setdefault(key, asyncio.Lock()):
            if key in self._loaded:
                return
            state = await client.load_adapter(adapter.path, adapter.name)
            if not client.speaks_text and state.digest != adapter.digest:
                raise Unavailable(
                    f"The files of the adapter {adapter.name} changed since it was registered.",
                    next_step="Register the adapter again.",
                    code="adapter_changed",
                )
            self._loaded.add(key)

    async def receipt_of(self, opened: OpenedRequest) -> Receipt | None:
        """Asks the engine that had the request; if it is not among ours, all of them."""
        everyone = [client for client in self.engines() if client.healthy()]
        if not everyone:
            raise Unavailable("No engine answers.", code="engine_unavailable")
        named = [client for client in everyone if client.engine_id == opened.engine_id]
        for client in named or everyone:
            receipt = await client.receipt(opened.request_id)
            if receipt is not None:
                return receipt
        return None

    def acknowledge_soon(self, request_id: str) -> None:
        """Gathers what one turn of the event loop settles into one message."""
        if not self._settled:
            asyncio.get_running_loop().call_later(0.2, self._send_settled)
        self._settled.append(request_id)

    def _send_settled(self) -> None:
        settled, self._settled = self._settled, []
        task = asyncio.ensure_future(self.acknowledge(settled))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def acknowledge(self, request_ids: list[str]) -> None:
        for client in self.engines():
            try:
                await client.acknowledge(request_ids)
            except TollhouseError:
                continue  # a receipt kept too long costs memory only


def _load(client: EngineClient) -> tuple[int, int]:
    stats = client.stats()
    return (stats.waiting, stats.running) if stats else (1 << 30, 0)
