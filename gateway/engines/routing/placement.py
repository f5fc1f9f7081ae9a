"""Chooses the replica with the lowest expected time to first token. Pure functions on snapshots.

The estimate is a sum of seconds, so that every term can be checked: the prompts queued before this
one, the part of this prompt that is not cached or must be read from a tier, the adapter if it must be
loaded, and the blocks that must be freed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.protocol import AdapterState, EngineStats

# The share of an adapter's load time that remains in each state: copying to the device, or reading
# from disk as well.
_SHARE_OF_LOAD = {"resident": 0.0, "loading": 0.1, "host": 0.2, "draining": 0.5, "absent": 1.0}

# How many times faster a block is read from a tier than computed: a cautious value, for a disk.
_RESTORING = 4.0


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    prompt_tokens: int
    output_tokens: int = 0  # expected; they need blocks too
    adapter: str | None = None  # digest


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """The state of a replica at one moment."""

    engine_id: str
    stats: EngineStats | None
    block_size: int = 16
    prefill_tokens_s: float = 2000.0  # a moving average
    adapter_load_s: float = 0.3  # a moving average
    queue_correction_tokens: int = (
        0  # correction of the reported queue, in prompt tokens; may be negative
    )
    held_blocks: int = 0  # blocks that its cache is known to hold
    under_way: int = 0  # requests of this process, which the stats may not include yet
    available: bool = True  # healthy, not draining, breaker allows
    sticky: bool = False  # it served the conversation's last turn
    # By digest, in the newest generation that the replica reported.
    adapters: Mapping[str, AdapterState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    engine_id: str
    wait_s: float
    compute_s: float
    adapter_s: float
    eviction_s: float
    cached_blocks: int
    restore_s: float = 0.0  # to read what only a tier of the replica holds

    @property
    def total_s(self) -> float:
        known = self.wait_s + self.compute_s + self.adapter_s + self.eviction_s
        return known + self.restore_s


def estimate(
    snapshot: ReplicaSnapshot,
    request: PlacementRequest,
    cached_blocks: int,
    tier_blocks: int = 0,
) -> Estimate:
    """`tier_blocks`: how many leading blocks a tier of the replica holds. Reading them costs less than
    computing them, and more than finding them in the cache."""
    rate = max(snapshot.prefill_tokens_s, 1.0)
    # The last prompt token is always computed, since its logits give the first token.
    cached = min(cached_blocks * snapshot.block_size, max(request.prompt_tokens - 1, 0))
    most = max(request.prompt_tokens - 1, 0)
    restored = max(0, min(tier_blocks * snapshot.block_size, most) - cached)
    stats = snapshot.stats
    waiting = snapshot.queue_correction_tokens + (stats.tokens_waiting if stats else 0)
    # A step's budget goes first to the running sequences, one token each.
    running = stats.running if stats else 0
    return Estimate(
        snapshot.engine_id,
        wait_s=(waiting + running) / rate,
        compute_s=(request.prompt_tokens - cached - restored) / rate,
        adapter_s=snapshot.adapter_load_s * _SHARE_OF_LOAD[_state_of(snapshot, request.adapter)],
        eviction_s=_missing_tokens(snapshot, request, cached) / rate,
        cached_blocks=cached_blocks,
        restore_s=restored / (rate * _RESTORING),
    )


def choose(
    snapshots: Sequence[ReplicaSnapshot],
    request: PlacementRequest,
    overlap: Mapping[str, int],
    below: Mapping[str, int] | None = None,
) -> list[tuple[ReplicaSnapshot, Estimate]]:
    """The available replicas, best first; the rest of the list is the order of retries. `overlap` and
    `below`: the leading blocks that each holds in its cache, and in its tiers.

    Estimates within a tenth of the best count as equal. Ties are broken by stickiness, then by the
    cached part of the prompt, then by load, then by the emptier cache, so that tenants spread over
    idle replicas.
    """
    judged = [
        (
            snapshot,
            estimate(
                snapshot,
                request,
                overlap.get(snapshot.engine_id, 0),
                (below or {}).get(snapshot.engine_id, 0),
            ),
        )
        for snapshot in snapshots
        if snapshot.available
    ]
    if not judged:
        return []
    best = min(cost.total_s for _, cost in judged)
    near = best * 1.1 + 0.001

    def _rank(pair: tuple[ReplicaSnapshot, Estimate]) -> tuple[float, bool, int, int, int, str]:
        snapshot, cost = pair
        stats, load = snapshot.stats, snapshot.under_way
        if stats is not None:
            load = max(load, stats.running + stats.waiting)
        order = 0.0 if cost.total_s <= near else cost.total_s
        tie_break = (-cost.cached_blocks, load, snapshot.held_blocks, snapshot.engine_id)
        return (order, not snapshot.sticky, *tie_break)

    return sorted(judged, key=_rank)


def _state_of(snapshot: ReplicaSnapshot, adapter: str | None) -> str:
    if adapter is None:
        return "resident"
    known = snapshot.adapters.get(adapter)
    return known.state if known is not None and known.state in _SHARE_OF_LOAD else "absent"


def _missing_tokens(snapshot: ReplicaSnapshot, request: PlacementRequest, cached: int) -> int:
    """Tokens' worth of blocks that must be freed before this request fits."""
    if snapshot.stats is None or not snapshot.stats.blocks_total:
        return 0  # the server does not report its blocks
    needed = request.prompt_tokens - cached + request.output_tokens
    return max(0, needed - snapshot.stats.blocks_free * snapshot.block_size)


def explain(cost: Estimate, block_size: int, among: int, *, sticky: bool) -> str:
    """Why a replica was chosen, for the usage event."""
    parts = [f"{cost.total_s * 1000:.0f} ms expected, least of {among}"]
    if cost.cached_blocks:
        parts.append(f"{cost.cached_blocks * block_size} tokens cached")
    if cost.restore_s:
        parts.append("a part in a tier")
    if cost.adapter_s:
        parts.append("adapter to load")
    if sticky:
        parts.append("same conversation")
    return ", ".join(parts)
