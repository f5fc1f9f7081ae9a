"""The block keys of sequences, computed only as far as they are needed, and a bounded number a step."""

from collections.abc import Callable

from engine.cache.blocks import BlockPool
from engine.cache.prefix import PUBLIC, PrefixHasher
from engine.errors import IntegrityError
from engine.scheduling.eviction import Eviction
from engine.scheduling.sequence import Sequence

HASHES = 512  # most keys of waiting prompts that a step computes while sequences run: about 0.5 ms


class SequenceKeys:
    """Looks up sequences in the prefix cache."""

    def __init__(
        self,
        hasher: PrefixHasher,
        pool: BlockPool,
        *,
        enabled: bool,
        eviction: Eviction | None = None,
    ) -> None:
        self._hasher = hasher
        self._pool = pool
        self._enabled = enabled
        self._eviction = eviction
        # Whether a sequence with so many blocks in the pool waits for more from the tiers.
        self.fetching: Callable[[Sequence, int], bool] | None = None
        self._left = 0  # keys that this step may still compute for waiting sequences

    def begin_step(self, *, idle: bool) -> None:
        """When the engine is idle, nobody waits for the hashing."""
        self._left = 1 << 30 if idle else HASHES

    def begin(self, seq: Sequence) -> None:
        """Note how much of a new sequence's prompt is public."""
        if self._enabled:
            request = seq.request
            request.public_blocks = self._hasher.public_blocks(request.inputs.prompt)

    def extend(self, seq: Sequence, count: int) -> None:
        """Compute the missing ones of the first `count` keys of the sequence's full blocks."""
        inputs = seq.request.inputs
        self._hasher.extend(
            seq.keys,
            seq.history,
            inputs.namespace,
            inputs.adapter,
            seq.request.public_blocks,
            count,
        )

    def owner(self, seq: Sequence, index: int) -> str:
        """Whose cache entry the block is."""
        return PUBLIC if index < seq.request.public_blocks else seq.request.inputs.namespace

    def hits(self, seq: Sequence) -> int:
        """The number of leading blocks that are cached and that the sequence may use. Keys are
        computed up to the first miss, so that a new prompt is not hashed as a whole."""
        limit = self.limit(seq)
        hits = self._pool.hits(seq.keys, limit)
        while hits == len(seq.keys) < limit and self._left > 0:
            self._left -= 1
            self.extend(seq, hits + 1)
            hits += self._pool.find(seq.keys[hits]) is not None
        return self._pool.with_window(seq.keys, hits)

    def unfinished(self, seq: Sequence, hits: int) -> bool:
        """Whether more blocks may be found later: the step had computed its number of keys, or
        copies of the next blocks are being read."""
        limit = self.limit(seq)
        hashed = len(seq.keys)
        if hashed < limit and self._left <= 0 and self._pool.hits(seq.keys, limit) == hashed:
            return True
        return self.fetching is not None and self.fetching(seq, hits)

    def share(self, seq: Sequence, count: int) -> list[int]:
        """The first `count` blocks of the sequence, all cached, each held once more."""
        blocks = []
        for key in seq.keys[:count]:
            block = self._pool.find(key)
            if block is None:
                raise IntegrityError("a cached block was removed between look-up and use")
            self._pool.share(block)
            blocks.append(block)
        return blocks

    def limit(self, seq: Sequence) -> int:
        """The most leading blocks that the sequence may take from the cache."""
        if not self._enabled or seq.request.reads_whole_prompt:
            return 0
        limit = (len(seq.history) - 1) // self._pool.block_size  # the last token is always computed
        if self._eviction is not None:
            limit = min(limit, self._eviction.most_cached(seq))
        if seq.request.cached is not None:
            # The cached count is frozen: blocks cached by others since then are not used.
            limit = min(limit, seq.counted_until // self._pool.block_size)
        return limit
