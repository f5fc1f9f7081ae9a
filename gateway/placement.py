"""Which replica: the one with the lowest expected time to first token. Pure functions on snapshots.

The estimate is a sum of seconds, so that every term can be read and argued with: the prompts that
wait in front, the part of this prompt that is not cached there, the adapter if it must be loaded,
and the blocks that must be freed first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.protocol import EngineStats


@dataclass(frozen=True, slots=True)
class Ask:
    prompt_tokens: int
    output_tokens: int = 0  # expected, for the blocks that it will need
    adapter: str | None = None  # digest


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as the router sees it now."""

    engine_id: str
    stats: EngineStats | None
    block_size: int = 16
    prefill_tokens_s: float = 2000.0  # measured, a moving average
    adapter_load_s: float = 0.3  # likewise
    unseen_tokens: int = 0  # prompts sent there since the stats were taken
    available: bool = True  # healthy, not draining, breaker allows
    sticky: bool = False  # this conversation's last turn ran there
    generations: Mapping[str, int] = field(default_factory=dict)  # adapter digest -> generation


@dataclass(frozen=True, slots=True)
class Estimate:
    engine_id: str
    wait_s: float
    compute_s: float
    adapter_s: float
    room_s: float
    cached_blocks: int

    @property
    def total_s(self) -> float:
        return self.wait_s + self.compute_s + self.adapter_s + self.room_s


def estimate(replica: Replica, ask: Ask, cached_blocks: int) -> Estimate:
    rate = max(replica.prefill_tokens_s, 1.0)
    # The last prompt token is always computed: its logits give the first token.
    cached = min(cached_blocks * replica.block_size, max(ask.prompt_tokens - 1, 0))
    stats = replica.stats
    waiting = replica.unseen_tokens + (stats.tokens_waiting if stats else 0)
    # A step's budget is first spent on the running sequences, one token each.
    running = stats.running if stats else 0
    return Estimate(
        replica.engine_id,
        wait_s=(waiting + running) / rate,
        compute_s=(ask.prompt_tokens - cached) / rate,
        adapter_s=0.0 if _resident(replica, ask.adapter) else replica.adapter_load_s,
        room_s=_missing_tokens(replica, ask, cached) / rate,
        cached_blocks=cached_blocks,
    )


def choose(
    replicas: Sequence[Replica], ask: Ask, overlap: Mapping[str, int]
) -> list[tuple[Replica, Estimate]]:
    """The available replicas, best first; the rest of the list is the order of retries.

    Within a tenth the estimates are equal: then the sticky one, then the emptier one goes first.
    """
    judged = [
        (replica, estimate(replica, ask, overlap.get(replica.engine_id, 0)))
        for replica in replicas
        if replica.available
    ]
    if not judged:
        return []
    best = min(guess.total_s for _, guess in judged)
    near = best * 1.1 + 0.001

    def _rank(pair: tuple[Replica, Estimate]) -> tuple[float, bool, int, str]:
        replica, guess = pair
        tied = guess.total_s <= near
        load = (replica.stats.running + replica.stats.waiting) if replica.stats else 0
        return (0.0 if tied else guess.total_s, not replica.sticky, load, replica.engine_id)

    return sorted(judged, key=_rank)


def _resident(replica: Replica, adapter: str | None) -> bool:
    if adapter is None:
        return True
    if replica.stats is None:
        return False
    known = replica.generations.get(adapter)
    return any(
        state.digest == adapter
        and state.state == "resident"
        and (known is None or known == state.generation)
        for state in replica.stats.adapters
    )


def _missing_tokens(replica: Replica, ask: Ask, cached: int) -> int:
    """Tokens of room that others must give back before this request fits."""
    if replica.stats is None:
        return 0
    needed = ask.prompt_tokens - cached + ask.output_tokens
    return max(0, needed - replica.stats.blocks_free * replica.block_size)
