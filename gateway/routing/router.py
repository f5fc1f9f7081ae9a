"""The router: sends a request to the replica with the lowest expected time to first token."""

import asyncio
from collections.abc import Container, Iterable, Sequence

from msgspec import Struct

from core.clock import Clock, SystemClock
from core.errors import TollhouseError, Unavailable
from core.events import OpenedRequest
from engine.protocol import Receipt
from gateway.ask import Ask
from gateway.catalog.catalog import Target
from gateway.engines.base import EngineClient, Generation
from gateway.engines.several import summed
from gateway.routing.adapter_heat import AdapterHeat
from gateway.routing.adapter_loads import AdapterLoads
from gateway.routing.conversations import Conversations, marks_of
from gateway.routing.placement import Ask as Wanted
from gateway.routing.placement import Estimate, choose
from gateway.routing.prefix_chains import PrefixChains
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.replicas import Place, Waiting

_LOOK_S = 0.05
_USUAL_RATE = 2000.0  # prompt tokens per second, assumed until a replica was measured
_EXPECTED_OUTPUT = 256  # output tokens for which a replica should have free blocks


class Query(Struct, frozen=True):
    """A request to be placed."""

    target: Target
    ids: list[int]
    namespace: str
    ask: Ask
    max_tokens: int

    @property
    def adapter(self) -> str | None:
        return self.target.adapter.digest if self.target.adapter is not None else None


class Pick(Struct, frozen=True):
    place: Place
    why: str
    new_tokens: int  # prompt tokens that the replica must compute
    expected_s: float = 0.0  # seconds to the first token; 0 if only one replica was available


class Router:
    """The replicas of every model, and the index of their prefix caches."""

    def __init__(self, clock: Clock | None = None, *, cold_start_s: float = 60.0) -> None:
        self.clock = clock or SystemClock()
        self.cold_start_s = cold_start_s
        self.index = PrefixIndex()
        self.loads = AdapterLoads(self.clock)
        self.heat = AdapterHeat(self.clock)
        self._chains = PrefixChains()
        self._conversations = Conversations()
        self._places: dict[str, list[Place]] = {}
        self._settled: list[str] = []
        self._sending: set[asyncio.Future[None]] = set()

    def add(self, model: str, clients: Sequence[EngineClient]) -> None:
        known = {id(place.client): place for place in self.places()}
        mine = self._places.setdefault(model, [])
        mine += [known.get(id(client)) or Place(client, self.clock) for client in clients]

    def places(self) -> Iterable[Place]:
        return {id(p): p for places in self._places.values() for p in places}.values()

    def engines(self) -> Iterable[EngineClient]:
        return [place.client for place in self.places()]

    def models(self) -> Iterable[tuple[str, list[Place]]]:
        return self._places.items()

    def of(self, model: str) -> list[Place]:
        return self._places.get(model, [])

    def route(self, query: Query) -> "Route":
        return Route(self, query)

    def best(self, query: Query, shut: Container[str]) -> "Pick | None":
        """The best replica outside `shut`; None if no replica can take the request."""
        places = [p for p in self.of(query.target.model.name) if p.name not in shut and p.serves()]
        if len(places) > 1:
            places = [place for place in places if not place.silent] or places
        if len(places) < 2:
            return Pick(places[0], "the only one ready", len(query.ids)) if places else None
        marks = self._marks(query)
        ran = self._conversations.last(marks)
        overlap = self._overlap(places, query)
        wanted = Wanted(len(query.ids), min(query.max_tokens, _EXPECTED_OUTPUT), query.adapter)
        held = self.index.blocks
        rates = [place.prefill_tokens_s for place in places if place.prefill_tokens_s]
        usual = sum(rates) / len(rates) if rates else _USUAL_RATE
        seen = [
            p.seen(sticky=p.name == ran, held_blocks=held(p.name), usual_rate=usual) for p in places
        ]
        ranked = choose(seen, wanted, overlap)
        replica, guess = ranked[0]
        place = next(p for p in places if p.name == replica.engine_id)
        self._conversations.note(marks, place.name)
        why = _reason(guess, replica.block_size, len(places), sticky=replica.sticky)
        new = max(0, len(query.ids) - guess.cached_blocks * replica.block_size)
        return Pick(place, why, new, guess.total_s)

    def refusal(self, model: str) -> Unavailable:
        """The error when no replica can serve, with a retry-after from the replicas' own states."""
        waits, code, state = [], "engine_unavailable", "is ready"
        for place in self.of(model):
            coming = place.client.coming()
            if place.draining:
                continue
            if coming is not None:
                waits.append(coming.left_s)
                code, state = "model_loading", "has loaded it yet"
            elif place.client.healthy():
                waits.append(place.breaker.retry_after_s())
        return Unavailable(
            f"No engine of {model} {state}.",
            next_step="Wait for the time in retry-after; /readyz shows what is missing.",
            code=code,
            retry_after_s=max(0.5, min(waits, default=2.0)),
        )

    async def receipt_of(self, opened: OpenedRequest) -> Receipt | None:
        """The receipt from the engine that ran the request, or from any if that one is unknown."""
        named = [c for c in self.engines() if c.engine_id == opened.engine_id]
        asked = [client for client in named or self.engines() if client.healthy()]
        if not asked:
            raise Unavailable(
                f"No engine answers that may have the receipt of {opened.request_id}.",
                next_step="Wait until the engine is back; /readyz shows its state.",
                code="engine_unavailable",
            )
        for client in asked:
            asked_for = [await client.receipt(name) for name in opened.engine_names]
            if found := [receipt for receipt in asked_for if receipt is not None]:
                return summed(opened.request_id, found) if len(asked_for) > 1 else found[0]
        return None

    def acknowledge_soon(self, *engine_names: str) -> None:
        """Acknowledge receipts, with one message per engine for those of the next 0.2 s."""
        if not self._settled:
            asyncio.get_running_loop().call_later(0.2, self._send_settled)
        self._settled += engine_names

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
                continue  # a receipt that is kept longer costs only memory

    def _marks(self, query: Query) -> list[int]:
        model = query.target.model.name
        return marks_of(query.namespace, model, query.adapter, query.ask.messages)

    def _overlap(self, places: Sequence[Place], query: Query) -> dict[str, int]:
        if query.target.model.codec is None:
            return {}
        for place in places:
            info = place.client.info()
            if info is not None and self.index.blocks(place.name):
                keys = self._chains.keys(info, query.ids, query.namespace, query.adapter)
                return self.index.overlap(keys)
        return {}


class Route:
    """The route of one request: the replicas that it tried, and the current one."""

    def __init__(self, router: Router, query: Query) -> None:
        self._router = router
        self.query = query
        self.place: Place | None = None
        self.tried: dict[str, str] = {}  # replica -> code of what went wrong there
        self._pick: Pick | None = None
        self._shut: dict[str, tuple[Place, str | None]] = {}  # with the process that was lost
        self._process = ""  # the replica's process when it was chosen
        self._lost = 0
        self._pending = 0
        self._on: Place | None = None  # the replica whose count includes this request

    def next(self) -> Place | None:
        """Choose the replica to send to; None if there is none. A replica whose process was lost is
        eligible again after a restart."""
        shut = {name for name, (p, lost) in self._shut.items() if lost in (None, p.process())}
        found = self._router.best(self.query, shut)
        if found is None:
            self.place = None
            return None
        self._pick, self.place, self._process = found, found.place, found.place.process()
        return self.place

    def coming(self) -> bool:
        """Whether a replica is starting or loading its model."""
        return any(
            place.client.coming() is not None and not place.draining
            for place in self._router.of(self.query.target.model.name)
            if self._shut.get(place.name, (place, ""))[1] is not None
        )

    async def wait(self) -> Place:
        """Wait for a replica. Raises Unavailable if none is starting, or if it takes too long."""
        clock = self._router.clock
        until = clock.monotonic() + self._router.cold_start_s
        while (place := self.next()) is None:
            if not self.coming() or clock.monotonic() >= until:
                raise self.refusal()
            await asyncio.sleep(_LOOK_S)
        return place

    async def load_adapter(self, place: Place) -> None:
        """Load the request's adapter on the replica unless it is registered there."""
        adapter = self.query.target.adapter
        if adapter is None or place.has(adapter.digest):
            return
        try:
            async with asyncio.timeout(self._router.cold_start_s):
                await self._router.loads.ensure(place, adapter)
        except TimeoutError:
            raise Unavailable(
                f"The adapter {adapter.name} is still being loaded.",
                next_step="Wait for the time in retry-after, then try again.",
                code="adapter_loading",
                retry_after_s=max(1.0, place.adapter_load_s),
            ) from None

    def refusal(self) -> Unavailable:
        return self._router.refusal(self.query.target.model.name)

    def why(self) -> str:
        """The reason for the choice, in at most 120 characters, for the usage event."""
        past = "".join(f"{code} at {name}; " for name, code in self.tried.items())
        return (past + (self._pick.why if self._pick is not None else ""))[:120]

    def sent(self, generation: Generation | None = None) -> None:
        """The request was sent. A `generation` is broken off if the replica hangs."""
        pick = self._pick
        if pick is not None:
            self._on, self._pending = pick.place, pick.new_tokens
            self._on.sent(self._pending)
            if generation is not None:
                whole = self._on.client.speaks_text and not self.query.ask.stream
                since = self._router.clock.monotonic()
                self._on.waiting[self] = Waiting(generation, since, pick.expected_s, whole)
            if self.query.adapter is not None:
                self._router.heat.note(self.query.adapter)

    def begun(self) -> None:
        """The first token arrived."""
        if self._on is not None:
            self._on.begun(self._pending)
            self._on.waiting.pop(self, None)
            self._pending = 0

    def answered(self) -> None:
        if self.place is not None:
            self.place.answered()

    def left(self, receipt: Receipt | None) -> None:
        """The request has ended on the replica, with any outcome."""
        self.begun()
        if self._on is not None:
            self._on.ended(receipt)
            self._on = None

    def failed(self, error: TollhouseError) -> bool:
        """Note a failure of the current replica. True if another may be tried: the fault lies with
        the replica, and fewer than two engines were lost while they ran this request."""
        place = self.place
        self.left(None)
        if place is None or error.code not in ELSEWHERE:
            return False
        self.tried[place.name] = error.code
        lost = error.code == "engine_unavailable"
        self._shut[place.name] = (place, self._process if lost else None)
        self._lost += lost
        # With an adapter, the fault may be in its files, so it does not count against the engine.
        if error.code == "engine_unavailable" or (
            error.code == "engine_failed" and self.query.adapter is None
        ):
            place.failed(error.message)
        return self._lost < 2 and len(self.tried) < 4


# Codes of errors for which another replica is tried.
ELSEWHERE = frozenset(
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
MODEL_AWAY = ELSEWHERE | {"model_loading", "adapter_loading"}


def _reason(guess: Estimate, block_size: int, among: int, *, sticky: bool) -> str:
    said = [f"{guess.total_s * 1000:.0f} ms expected, least of {among}"]
    if guess.cached_blocks:
        said.append(f"{guess.cached_blocks * block_size} tokens cached")
    if guess.adapter_s:
        said.append("adapter to load")
    if sticky:
        said.append("same conversation")
    return ", ".join(said)
