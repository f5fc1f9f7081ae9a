"""Whether a waiting sequence fits: places in the batch, blocks, and its adapter's slot and blocks."""

from engine.adapters.registry import AdapterRegistry
from engine.batch import AdapterHandle
from engine.cache.blocks import BlockPool
from engine.config import EngineConfig
from engine.model_spec import Sight
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_keys import SequenceKeys


def most_blocks(sight: Sight, config: EngineConfig) -> int:
    """Blocks that a sequence holds at most while it computes one step's tokens; 0: all of its own."""
    if not sight.window:
        return 0
    parts = (sight.first, sight.window + config.max_batch_tokens)
    return sum(-(-part // config.block_size) for part in parts) + 1


class Capacity:
    """Reads the scheduler's running sequences."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        adapters: AdapterRegistry,
        keys: SequenceKeys,
        running: list[Sequence],
        sight: Sight,
    ) -> None:
        self._config = config
        self._pool = pool
        self._adapters = adapters
        self._keys = keys
        self._running = running
        self._sight = sight
        self._size = config.block_size

    def would_fit(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Whether a waiting sequence fits, with its adapter, after the sequences in `preempted` are
        preempted."""
        if self.missing_places() > len(preempted):
            return False
        hits = self._keys.hits(seq)
        unread = len(self._sight.unread_blocks(hits * self._size, self._size))
        need = self.whole(self.blocks_for(seq, hits * self._size)) + self.margin()
        shared = max(unread, self._pool.held(seq.keys, hits))  # of the cached blocks
        blocks = self._pool.available(seq.request.inputs.namespace)
        blocks += self._pool.without_parts(shared)
        blocks += self._pool.freed_by(other.held_blocks for other in preempted)
        adapters = self._adapters.room(seq.request.inputs.adapter, [s.handle for s in preempted])
        return adapters is not None and blocks + adapters >= need

    def blocks_for(self, seq: Sequence, start: int) -> int:
        """How many blocks the sequence's table has when it computes from `start` on: where layers let
        go of blocks, enough for one step."""
        end = len(seq.history) + seq.pending
        if self._sight.window:
            end = min(end, start + self._config.max_batch_tokens)
        return -(-end // self._size)

    def whole(self, blocks: int, hits: int = 0) -> int:
        """The memory that a sequence needs for so many blocks in addition to `hits` cached ones, in whole
        blocks: layers with a window need theirs for the window alone."""
        return self._pool.whole(blocks, len(self._pool.seen_parts(hits, hits * self._size)))

    def slot_holders(self, sequences: list[Sequence]) -> list[Sequence]:
        """The fewest of these sequences whose preemption frees an adapter's slot."""
        by_handle: dict[AdapterHandle, list[Sequence]] = {}
        for seq in sequences:
            if seq.handle is not None:
                by_handle.setdefault(seq.handle, []).append(seq)
        whole = (each for h, each in by_handle.items() if len(each) == self._adapters.users(h))
        return min(whole, key=len, default=[])

    def missing_places(self) -> int:
        """How many sequences must leave the batch before one more can join it. The choices of a
        request join one by one: those without a place wait when it forks."""
        return len(self._running) + 1 - self._config.max_running

    def margin(self) -> int:
        """Blocks to leave free for the running sequences: without them an admission would lead to
        a preemption in one of the next steps."""
        return len(self._running) // 4 + 1 if self._running else 0

    def may_fit(self, seq: Sequence, hits: int, spare: int, force: bool) -> bool:
        """Whether it is worth holding the prefix to see if the rest fits. May be wrongly true."""
        inputs = seq.request.inputs
        room = self._adapters.room(inputs.adapter, [])
        unread = len(self._sight.unread_blocks(hits * self._size, self._size))
        idle = max(0, hits - max(unread, self._pool.held_prefix(seq.keys, hits)))
        available = self._pool.available(inputs.namespace, force) - self._pool.without_parts(idle)
        return room is None or available + room >= spare
