"""Places a request on the servers of a pool, best first, or refuses it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from core import metrics
from gateway.engines.picker.asks import Ask
from gateway.engines.picker.learned_prefixes import BLOCK_TOKENS, LearnedPrefixes
from gateway.engines.picker.servers import Members, Server, Servers
from gateway.engines.routing.placement import PlacementRequest, choose

_BLOCKS = 30_000  # of a server that does not report its cache


class Refused(Exception):
    """`status`: 503 where no server is ready, 429 where the request is shed."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(slots=True)
class Placed:
    """A request on its way. `served` and `ended` each count once, however often they are called."""

    servers: list[str]  # addresses, best first
    ask: Ask
    why: str
    _picker: "Picker"
    _server: Server | None = field(default=None)

    def served(self, address: str) -> None:
        """The proxy sent the request there: another than the first if that did not connect."""
        if address and address != self.servers[0]:
            self._picker.sent(self.ask, address)

    def ended(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._picker.ended(self.ask, server)


class Picker:
    """Servers with what they have likely cached, and the requests under way by fairness id."""

    def __init__(self, members: Members, objectives: Mapping[str, int], queue_limit: int) -> None:
        """`objectives`: priorities by name; one below zero may be refused. `queue_limit`: requests
        that wait at a server from which it counts as saturated."""
        self.prefixes = LearnedPrefixes(_BLOCKS)
        self.servers = Servers(members, self.prefixes.forget)
        self._objectives, self._queue_limit = objectives, queue_limit
        self._under_way: Counter[str] = Counter()
        self.held_bytes = 0  # of bodies whose requests are not placed yet

    def pick(self, ask: Ask) -> Placed:
        """The servers for the request. Refused if there are none, or if it is shed."""
        servers = self._able(ask)
        self._require_room(ask, servers)
        overlap = self.prefixes.overlap(ask.keys)
        blocks = self.prefixes.blocks
        snapshots = [each.snapshot(blocks(each.address), BLOCK_TOKENS) for each in servers]
        adapter = ask.model if any(ask.model in each.adapters for each in servers) else None
        request = PlacementRequest(ask.prompt_tokens, ask.output_tokens, adapter)
        ranked = choose(snapshots, request, overlap)
        best, cost = ranked[0]
        server = next(each for each in servers if each.address == best.engine_id)
        server.under_way += 1
        server.unreported += max(0, ask.prompt_tokens - cost.cached_blocks * BLOCK_TOKENS)
        self._under_way[ask.fairness] += 1
        self.sent(ask, server.address)
        metrics.picker_decisions.labels("picked").inc()
        why = f"{cost.total_s * 1000:.0f} ms expected, {cost.cached_blocks} blocks cached"
        return Placed([each.engine_id for each, _ in ranked], ask, why, self, server)

    def sent(self, ask: Ask, address: str) -> None:
        server = self.servers.of(address)
        if server is not None:
            self.prefixes.sent(address, ask.keys, server.cached_tokens() // BLOCK_TOKENS)

    def ended(self, ask: Ask, server: Server) -> None:
        server.under_way -= 1
        self._under_way[ask.fairness] -= 1
        if not self._under_way[ask.fairness]:
            del self._under_way[ask.fairness]

    def _able(self, ask: Ask) -> list[Server]:
        ready = self.servers.ready()
        if ask.subset is not None:
            ready = [each for each in ready if each.address in ask.subset]
        # A name that no server lists is not known here: its server refuses it in its own words.
        able = [each for each in ready if ask.model in each.models or not each.models] or ready
        if not able:
            metrics.picker_decisions.labels("none_ready").inc()
            where = "of the subset that the proxy allows " if ask.subset is not None else ""
            raise Refused(503, "none-ready", f"No server {where}is ready. Try again later.")
        return able

    def _require_room(self, ask: Ask, servers: list[Server]) -> None:
        if not all(each.saturated(self._queue_limit) for each in servers):
            return
        sheddable = self._objectives.get(ask.objective, 0) < 0
        others = len(self._under_way.keys() - {ask.fairness})
        share = self._under_way.total() / (others + 1)
        if sheddable or (others and self._under_way[ask.fairness] > share):
            metrics.picker_decisions.labels("shed").inc()
            reason = "priority" if sheddable else "share"
            raise Refused(429, reason, "Every server is full. Try again later.")
