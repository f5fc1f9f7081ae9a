"""The router: sends a request to the replica with the lowest expected time to first token."""

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec import Struct

from core import metrics
from core.clock import Clock, SystemClock
from core.errors import EngineLost, TollhouseError, Unavailable
from core.events import OpenedRequest
from engine.protocol import Receipt
from gateway.catalog.catalog import Target
from gateway.engines.routing.adapter_loads import AdapterLoads, AdapterPopularity
from gateway.engines.routing.canaries import in_turn, point_of
from gateway.engines.routing.conversations import Conversations, prefix_hashes
from gateway.engines.routing.placement import PlacementRequest, choose, explain
from gateway.engines.routing.prefix_chains import PrefixChains
from gateway.engines.routing.prefix_index import PrefixIndex
from gateway.engines.routing.replicas import Replica, WaitingRequest
from gateway.engines.routing.suspects import Suspects
from gateway.prompts.prompt import Prompt
from gateway.request.engine import EngineClient, Generation

_POLL_S = 0.05
_DEFAULT_RATE = 2000.0  # prompt tokens per second, assumed until a replica was measured
_EXPECTED_OUTPUT = 256  # output tokens for which a replica should have free blocks


class Query(Struct, frozen=True):
    """A request to be placed."""

    target: Target
    prompt: Prompt
    namespace: str

    @property
    def ids(self) -> list[int]:
        return self.prompt.first_ids

    @property
    def adapter(self) -> str | None:
        return self.target.adapter.digest if self.target.adapter is not None else None


class Choice(Struct, frozen=True):
    replica: Replica
    why: str
    new_tokens: int  # prompt tokens that the replica must compute
    expected_s: float = 0.0  # seconds to the first token; 0 if only one replica was available


class Router:
    """The replicas of every model, and the index of their prefix caches."""

    def __init__(self, clock: Clock | None = None, *, cold_start_s: float = 60.0) -> None:
        self.clock = clock or SystemClock()
        self.cold_start_s = cold_start_s
        self.index = PrefixIndex()
        self.suspects = Suspects(self.clock)
        self.loads = AdapterLoads(self.clock, self.suspects)
        self.popularity = AdapterPopularity(self.clock)
        self._chains = PrefixChains()
        self._conversations = Conversations()
        self._replicas: dict[str, list[Replica]] = {}
        self._retired: list[Replica] = []  # no longer in the list; their last requests still run
        self.canaries: Mapping[str, int] = {}  # percent of the conversations, by replica
        self._settled: list[str] = []
        self._closed = False
        self._sending: set[asyncio.Future[None]] = set()

    def serve_by(self, clients: Mapping[str, Sequence[EngineClient]]) -> list[Replica]:
        """From now on, send requests to these clients only, by model. A known client keeps its replica,
        and a name its drain. Returns the replicas that are no longer used, which `forget` ends."""
        known = {id(replica.client): replica for replica in self.replicas()}
        drained = {replica.name for replica in known.values() if replica.draining}
        made: dict[int, Replica] = {}
        for own in clients.values():
            for client in own:
                replica = known.get(id(client)) or made.get(id(client))
                if replica is None:
                    replica = Replica(client, self.clock)
                    replica.draining = replica.name in drained
                made[id(client)] = replica
        retired = [replica for key, replica in known.items() if key not in made]
        self._retired += retired
        self._replicas = {
            model: [made[id(client)] for client in own] for model, own in clients.items()
        }
        for replica in retired:
            self.index.forget(replica.name)
        return retired

    def forget(self, replica: Replica) -> None:
        self._retired.remove(replica)

    def replicas(self) -> Iterable[Replica]:
        return {id(p): p for replicas in self._replicas.values() for p in replicas}.values()

    def in_use(self) -> list[EngineClient]:
        return [replica.client for replica in self.replicas()]

    def engines(self) -> Iterable[EngineClient]:
        """With those whose last requests still run."""
        return [*self.in_use(), *(replica.client for replica in self._retired)]

    def models(self) -> Iterable[tuple[str, list[Replica]]]:
        return self._replicas.items()

    def of(self, model: str) -> list[Replica]:
        return self._replicas.get(model, [])

    def route(self, query: Query) -> "Route":
        return Route(self, query)

    def best(self, query: Query, excluded: Container[str]) -> "Choice | None":
        """The best replica outside `excluded`; None if no replica can take the request."""
        replicas = [
            p
            for p in self._replicas.get(query.target.model.name, ())
            if p.name not in excluded and p.serves(query.namespace)
        ]
        if len(replicas) > 1:
            replicas = [replica for replica in replicas if not replica.silent] or replicas
        if self.canaries:
            replicas = self._in_turn(replicas, query)
        if not replicas:
            return None
        if len(replicas) == 1:
            return Choice(replicas[0], self._why_alone(replicas[0]), len(query.ids))
        hashes = self._prefix_hashes(query)
        last_replica = self._conversations.last(hashes)
        overlap, below = self._overlap(replicas, query)
        placement_request = PlacementRequest(
            len(query.ids), min(query.prompt.max_tokens, _EXPECTED_OUTPUT), query.adapter
        )
        held = self.index.blocks
        rates = [replica.prefill_tokens_s for replica in replicas if replica.prefill_tokens_s]
        typical_rate = sum(rates) / len(rates) if rates else _DEFAULT_RATE
        snapshots = [
            p.snapshot(
                sticky=p.name == last_replica, held_blocks=held(p.name), default_rate=typical_rate
            )
            for p in replicas
        ]
        ranked = choose(snapshots, placement_request, overlap, below)
        chosen, cost = ranked[0]
        replica = next(p for p in replicas if p.name == chosen.engine_id)
        self._conversations.note(hashes, replica.name)
        why = explain(cost, chosen.block_size, len(replicas), sticky=chosen.sticky)
        new = max(0, len(query.ids) - cost.cached_blocks * chosen.block_size)
        return Choice(replica, why, new, cost.total_s)

    def _why_alone(self, replica: Replica) -> str:
        share = self.canaries.get(replica.name)
        return "the only one ready" if share is None else f"canary of {share} % of conversations"

    def _in_turn(self, ready: list[Replica], query: Query) -> list[Replica]:
        every = self.of(query.target.model.name)
        if not any(replica.name in self.canaries for replica in every):
            return ready
        point = point_of(query.namespace, query.prompt.request.messages, query.ids)
        return in_turn(ready, every, self.canaries, point)

    def refusal(self, model: str, tenant: str) -> Unavailable:
        """The error when no replica can serve, with a retry-after from the replicas' own states."""
        waits, code, state = [], "engine_unavailable", "is ready"
        for replica in self.of(model):
            startup_progress = replica.client.startup_progress()
            if replica.draining:
                continue
            if startup_progress is not None:
                waits.append(startup_progress.remaining_s)
                code, state = "model_loading", "has loaded it yet"
            elif replica.client.healthy():
                waits.append(replica.retry_after_s(tenant))
        return Unavailable(
            f"No engine of {model} {state}.",
            next_step="Wait for the time in retry-after; /readyz shows what is missing.",
            code=code,
            retry_after_s=max(0.5, min(waits, default=2.0)),
        )

    async def receipts_of(self, opened: OpenedRequest) -> list[Receipt]:
        """The receipts of the request's prompts from the engine that ran it, or from any if that one
        is unknown."""
        named = [c for c in self.engines() if c.engine_id == opened.engine_id]
        asked = [client for client in named or self.engines() if client.healthy()]
        if not asked:
            raise Unavailable(
                f"No engine answers that may have the receipt of {opened.request_id}.",
                next_step="Wait until the engine is back; /readyz shows its state.",
                code="engine_unavailable",
            )
        for client in asked:
            asked_for = [await client.receipt(name) for name in opened.engine_request_ids]
            if choice := [receipt for receipt in asked_for if receipt is not None]:
                return choice
        return []

    def acknowledge_soon(self, *engine_request_ids: str) -> None:
        """Acknowledge receipts, with one message per engine for those of the next 0.2 s."""
        if self._closed:
            return  # the engine keeps the receipt until its own limit
        if not self._settled:
            asyncio.get_running_loop().call_later(0.2, self._send_settled)
        self._settled += engine_request_ids

    def _send_settled(self) -> None:
        settled, self._settled = self._settled, []
        if not settled:
            return
        task = asyncio.ensure_future(self.acknowledge(settled))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def close(self) -> None:
        """Send the acknowledgements that wait; later ones are dropped. Call it before the engines
        are closed."""
        self._send_settled()
        self._closed = True
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def acknowledge(self, request_ids: list[str]) -> None:
        for client in self.engines():
            try:
                await client.acknowledge(request_ids)
            except TollhouseError:
                continue  # a receipt that is kept longer costs only memory

    def _prefix_hashes(self, query: Query) -> list[int]:
        model = query.target.model.name
        return prefix_hashes(query.namespace, model, query.adapter, query.prompt.request.messages)

    def _overlap(
        self, replicas: Sequence[Replica], query: Query
    ) -> tuple[dict[str, int], dict[str, int]]:
        """The leading blocks that each replica holds in its cache, and in its tiers."""
        if query.target.model.codec is None:
            return {}, {}
        for replica in replicas:
            info = replica.client.info()
            if info is not None and self.index.knows(replica.name):
                keys = self._chains.keys(info, query.ids, query.namespace, query.adapter)
                if not self.index.has_tiers:
                    return self.index.overlap(keys), {}
                known = list(keys)
                return self.index.overlap(known), self.index.overlap_below(known)
        return {}, {}


class Route:
    """The route of one request: the replicas that it tried, and the current one."""

    def __init__(self, router: Router, query: Query) -> None:
        self._router = router
        self.query = query
        self.replica: Replica | None = None
        self.tried: dict[str, str] = {}  # replica -> code of what went wrong there
        self._choice: Choice | None = None
        self._excluded: dict[str, tuple[Replica, str | None]] = {}  # with the process that was lost
        self._process = ""  # the replica's process when it was chosen
        self._lost = 0
        self._pending = 0
        self._counted_on: Replica | None = None  # the replica whose count includes this request

    def next(self) -> Replica | None:
        """Choose the replica to send to; None if there is none. A replica whose process was lost is
        eligible again after a restart."""
        excluded: Container[str] = ()
        if self._excluded:
            excluded = {
                name for name, (p, lost) in self._excluded.items() if lost in (None, p.process())
            }
        choice = self._router.best(self.query, excluded)
        if choice is None:
            self.replica = None
            return None
        self._choice, self.replica, self._process = choice, choice.replica, choice.replica.process()
        return self.replica

    def is_starting(self) -> bool:
        """Whether a replica is starting or loading its model."""
        return any(
            replica.client.startup_progress() is not None and not replica.draining
            for replica in self._router.of(self.query.target.model.name)
            if self._excluded.get(replica.name, (replica, ""))[1] is not None
        )

    async def wait(self) -> Replica:
        """Wait for a replica. Raises Unavailable if none is starting, or if it takes too long."""
        clock = self._router.clock
        until = clock.monotonic() + self._router.cold_start_s
        while (replica := self.next()) is None:
            if not self.is_starting() or clock.monotonic() >= until:
                raise self.refusal()
            await asyncio.sleep(_POLL_S)
        return replica

    async def load_adapter(self, replica: Replica) -> None:
        """Load the request's adapter on the replica unless it is registered there."""
        adapter = self.query.target.adapter
        if adapter is None or replica.has(adapter.digest):
            return
        try:
            async with asyncio.timeout(self._router.cold_start_s):
                await self._router.loads.ensure(replica, adapter)
        except TimeoutError:
            raise Unavailable(
                f"The adapter {adapter.name} is still being loaded.",
                next_step="Wait for the time in retry-after, then try again.",
                code="adapter_loading",
                retry_after_s=max(1.0, replica.adapter_load_s),
            ) from None

    def refusal(self) -> Unavailable:
        return self._router.refusal(self.query.target.model.name, self.query.namespace)

    def why(self) -> str:
        """The reason for the choice, in at most 120 characters, for the usage event."""
        why = self._choice.why if self._choice is not None else ""
        if self.tried:
            why = "".join(f"{code} at {name}; " for name, code in self.tried.items()) + why
        return why[:120]

    def sent(self, generation: Generation | None = None) -> None:
        """The request was sent. A `generation` is broken off if the replica hangs."""
        choice = self._choice
        if choice is not None:
            self._counted_on, self._pending = choice.replica, choice.new_tokens
            self._counted_on.sent(self._pending, self.query.namespace)
            if generation is not None:
                whole = self._counted_on.client.speaks_text and not self.query.prompt.request.stream
                since = self._router.clock.monotonic()
                self._counted_on.waiting[self] = WaitingRequest(
                    generation, since, choice.expected_s, whole
                )
            if self.query.adapter is not None:
                self._router.popularity.note(self.query.adapter)

    def first_token(self) -> None:
        """The first token arrived."""
        if self._counted_on is not None:
            self._counted_on.first_token(self._pending)
            self._counted_on.waiting.pop(self, None)
            self._pending = 0

    def answered(self) -> None:
        if self.replica is not None:
            self.replica.answered(self.query.namespace)

    def left(self, receipt: Receipt | None) -> None:
        """The request has ended on the replica, with any outcome."""
        self.first_token()
        if self._counted_on is not None:
            self._counted_on.ended(receipt, self.query.namespace)
            self._counted_on = None

    def failed(self, error: TollhouseError) -> bool:
        """Note a failure of the current replica. True if another may be tried: the fault lies with
        the replica, which had not begun with the request if it was lost, and fewer than two were lost.
        """
        replica = self.replica
        self.left(None)
        if replica is None or error.code not in RETRY_ON_REPLICA:
            return False
        if isinstance(error, EngineLost):
            if self.query.target.adapter is not None:
                self._router.suspects.lost(self.query.target.adapter, self._process)
            metrics.lost_with_engine.labels(replica.name).inc()
        self.tried[replica.name] = error.code
        lost = error.code == "engine_unavailable"
        self._excluded[replica.name] = (replica, self._process if lost else None)
        self._lost += lost
        why = "; ".join([error.message, *getattr(error, "__notes__", ())])
        # With an adapter, the fault may be in its files, so it does not count against the engine.
        if lost:
            replica.failed(why)
        elif error.code == "engine_failed" and self.query.adapter is None:
            replica.failed_for(self.query.namespace, why)
        return not isinstance(error, EngineLost) and self._lost < 2 and len(self.tried) < 4


# Codes of errors for which another replica is tried.
RETRY_ON_REPLICA = frozenset(
    (
        "engine_unavailable",
        "engine_failed",
        "engine_full",
        "engine_draining",
        "adapter_not_loaded",
        "upstream_busy",
    )
)

# Codes of errors for which a fallback model is tried.
RETRY_ON_FALLBACK = RETRY_ON_REPLICA | {"model_loading", "adapter_loading"}
