"""The blocks of running sequences: what a row needs before it runs, and what is given back after it.

Where layers with a window keep their part of a block apart (`engine.cache.windowed`), a sequence has
the blocks of its whole prompt from the start, and a block's part when a row writes it.
"""

from engine.cache.blocks import BlockPool
from engine.config import EngineConfig
from engine.model_spec import Sight
from engine.scheduling.capacity import Capacity
from engine.scheduling.eviction import Eviction
from engine.scheduling.sequence import Sequence


class BlockTables:
    """Fills and empties the tables of sequences. `sight`: the positions that any layer sees."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        capacity: Capacity,
        sight: Sight,
        eviction: Eviction | None = None,
    ) -> None:
        self._pool = pool
        self._capacity = capacity
        self._size = config.block_size
        self._sight = sight
        self._eviction = eviction
        self._copies: list[tuple[int, int]] = []  # (from, to); both are held

    def ensure(self, seq: Sequence, force: bool) -> bool:
        """Provide writable blocks for the positions that the next row writes, at least for the first.
        False if too few are available. `force`: also what is kept for other tenants."""
        tenant = seq.request.inputs.namespace
        first = seq.computed // self._size
        if first < len(seq.blocks) and not self._pool.writable(seq.blocks[first]):
            fresh = self._pool.allocate(1, tenant, force)
            if fresh is None:
                return False
            # The source stays held until the batch is complete: an adapter that this step loads
            # must not take it before the copy is made.
            self._copies.append((seq.blocks[first], fresh[0]))
            seq.blocks[first] = fresh[0]
            seq.table_version += 1
        lacking = self._capacity.blocks_for(seq, seq.computed) - len(seq.blocks)
        if lacking > 0:
            fresh = self._pool.allocate(lacking, tenant, force, bare=True)
            if fresh is None:
                return False
            seq.blocks.extend(fresh)
        return self.cover(seq, seq.computed + 1, force)

    def lend(self, seq: Sequence, guesses: int, others: int) -> bool:
        """Provide blocks for guesses too, if the `others` can spare them."""
        length = len(seq.history) + seq.pending + guesses
        lacking = -(-length // self._size) - len(seq.blocks)
        if lacking > 0:
            tenant = seq.request.inputs.namespace
            if self._pool.available(tenant) < lacking + others:
                return False
            seq.blocks.extend(self._pool.allocate(lacking, tenant, bare=True) or ())
        return self.cover(seq, length, False)

    def cover(self, seq: Sequence, end: int, force: bool) -> bool:
        """Give the blocks up to the position `end` their parts for layers with a window. False if
        there is too little memory."""
        if self._pool.windowed is None:
            return True
        lacking = seq.blocks[seq.parts.stop : -(-end // self._size)]
        if lacking and not self._pool.add_parts(lacking, seq.request.inputs.namespace, force):
            return False
        seq.parts = range(seq.parts.start, seq.parts.stop + len(lacking))
        return True

    def covered(self, seq: Sequence, count: int) -> int:
        """How many of the next `count` positions have parts for layers with a window, after they
        got those that the other sequences can spare. The first has one."""
        if self._pool.windowed is None:
            return count
        tenant = seq.request.inputs.namespace
        spare = max(0, self._pool.parts_available(tenant) - self._capacity.margin())
        end = min(seq.computed + count, (seq.parts.stop + spare) * self._size)
        self.cover(seq, end, False)
        return end - seq.computed

    def share_parts(self, seq: Sequence, position: int) -> None:
        """Hold what layers with a window see of its blocks from `position` on."""
        seq.parts = self._pool.seen_parts(len(seq.blocks), position)
        self._pool.share_parts(seq.held_parts)

    def release_unread(self, seq: Sequence, position: int) -> None:
        """Release the blocks that no layer sees from `position` on, and the parts that no layer with a
        window sees."""
        if self._pool.windowed is not None:
            seen = self._pool.seen_parts(seq.parts.stop, position)
            self._pool.release_parts(reversed(seq.blocks[seq.parts.start : seen.start]))
            seq.parts = range(max(seq.parts.start, seen.start), seq.parts.stop)
        if self._eviction is None:
            unread = self._sight.unread_blocks(position, self._size)
        else:
            unread = self._eviction.unread_blocks(seq, position)
        self._pool.release(reversed(seq.let_go(unread)))

    def release(self, seq: Sequence) -> None:
        """Release all of them."""
        dropped = [pair for pair in self._copies if pair[1] in seq.blocks]
        self._copies = [pair for pair in self._copies if pair not in dropped]
        self._release_sources(dropped)
        self._pool.release_table(seq.held_blocks[::-1], seq.held_parts)
        seq.blocks, seq.unheld, seq.parts = [], range(0), range(0)
        seq.table_version += 1

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies (from, to) to make before the step that was scheduled: of blocks, and of slots or
        pages of their parts. Nothing holds the sources any more."""
        copies, self._copies = self._copies, []
        parts = self._pool.part_copies(copies)
        self._release_sources(copies)
        return copies, parts

    def copied(self) -> list[int]:
        """The blocks held because the next step copies from them."""
        return [source for source, _ in self._copies]

    def _release_sources(self, copies: list[tuple[int, int]]) -> None:
        sources = [source for source, _ in copies]
        self._pool.release_table(sources, sources)
