"""The pool of KV blocks: holders, prefix-cache keys, and the order of eviction.

Adapters take their memory from the same pool, so KV and weights share one budget.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from engine.cache.idle_blocks import IdleBlocks
from engine.errors import IntegrityError
from engine.protocol import KvEvent

if TYPE_CHECKING:
    from engine.cache.parts import Windowed

_MAX_FRESH = 4096  # blocks that wait to be copied out; more are not copied


def _bisect(count: int, found: Callable[[int], bool]) -> int:
    """How many of the numbers from 0 on are `found`, when none is after the first that is not."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if found(middle) else (low, middle)
    return low


class BlockPool:
    """Reference-counted blocks. A block is free, idle (cached, unused) or held; never two of them.

    A block is one piece of memory here. The methods that name parts are those of `WindowedPool`.
    """

    windowed: "Windowed | None" = None

    def __init__(
        self, num_blocks: int, block_size: int, *, floor: int = 0, cap: int | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self.keys: list[bytes | None] = [None] * num_blocks
        self.owners: list[str] = [""] * num_blocks  # of the cache entry; only valid with a key
        self._free = list(range(num_blocks - 1, -1, -1))
        # Floors protect at most half of the pool, or many idle tenants could block all admissions.
        self._idle = IdleBlocks(floor, cap, floor_total=num_blocks // 2)
        self._index: dict[bytes, int] = {}
        self._parents: list[bytes | None] = [None] * num_blocks  # only valid with a key
        self._children: dict[bytes, set[bytes]] = {}  # cached keys by their parent's
        self.events: list[KvEvent] | None = None  # None: no gateway subscribed
        # Blocks and their keys in the order of `cache`, for tiers; None: there is none.
        self.fresh: list[tuple[int, bytes]] | None = None

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence or adapter uses now, cached ones included."""
        return len(self._free) + len(self._idle)

    def available(self, owner: str, force: bool = False) -> int:
        return len(self._free) + self._idle.usable_by(owner, force)

    def allocate(
        self, count: int, owner: str, force: bool = False, *, bare: bool = False
    ) -> list[int] | None:
        """`count` blocks, each held once; None, and no change, when there are too few.
        `force` ignores floors; `bare`: the parts are not wanted yet."""
        if count > self.available(owner, force):
            return None
        return [self._take(owner, force) for _ in range(count)]

    def parts_available(self, owner: str, force: bool = False) -> int:
        return 0

    def whole(self, blocks: int, parts: int = 0) -> int:
        """The memory that a sequence which has `parts` needs for so many blocks more, in whole ones."""
        return blocks

    def without_parts(self, blocks: int) -> int:
        """The memory of blocks that have no part, in whole ones."""
        return blocks

    def add_parts(self, blocks: Sequence[int], owner: str, force: bool = False) -> bool:
        return True

    def share_parts(self, blocks: Iterable[int]) -> None:
        pass

    def release_parts(self, blocks: Iterable[int]) -> None:
        pass

    def part_copies(self, copies: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The slots or pages of these blocks' parts."""
        return []

    def check_parts(self, held: Iterable[int]) -> None:
        pass

    def seen_parts(self, count: int, position: int) -> range:
        return range(count, count)

    def with_window(self, keys: list[bytes], count: int) -> int:
        """The most of the first `count` keys, all cached, after which a sequence can go on."""
        return count

    def release_table(self, blocks: Sequence[int], parts: Sequence[int]) -> None:
        """`release`, of blocks whose `parts` are held too."""
        self.release(blocks)

    def find(self, key: bytes) -> int | None:
        return self._index.get(key)

    def hits(self, keys: list[bytes], limit: int) -> int:
        """How many leading keys are cached, at most `limit`. A cached key's parent is cached too, so
        the last of them is found by bisection."""
        return _bisect(min(limit, len(keys)), lambda n: keys[n] in self._index)

    def held(self, keys: list[bytes], count: int) -> int:
        """How many of the first `count` keys, all cached, belong to blocks that are in use."""
        return sum(self.refs[self._index[key]] > 0 for key in keys[:count])

    def held_prefix(self, keys: list[bytes], count: int) -> int:
        """Like `held`, by bisection; it errs where a sequence holds blocks of its own instead of
        cached ones with the same keys."""
        return _bisect(count, lambda n: self.refs[self._index[keys[n]]] > 0)

    def cached_keys(self) -> list[bytes]:
        """Every key that can be found now."""
        return list(self._index)

    def share(self, block: int) -> None:
        if self.refs[block] == 0:
            self._idle.remove(block)
        self.refs[block] += 1

    def writable(self, block: int) -> bool:
        """Whether a block may be written: a shared or cached one must be copied first."""
        return self.refs[block] == 1 and self.keys[block] is None

    def release(self, blocks: Iterable[int]) -> None:
        """Release in the given order; pass a block table reversed, so that tails are evicted
        first."""
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] > 0:
                continue
            if self.refs[block] < 0:
                raise IntegrityError(f"block {block} was released more often than it was held")
            if self.keys[block] is None:
                self._freed(block)
                continue
            evicted = self._idle.add(block, self.owners[block])
            if evicted is not None:
                self._idle.remove(evicted)
                self._forget(evicted)
                self._freed(evicted)

    def freed_by(self, tables: Iterable[list[int]]) -> int:
        """How many blocks would have no holder left if these tables were released."""
        return len(self._freed_by(tables))

    def _freed_by(self, tables: Iterable[list[int]]) -> list[int]:
        counts = Counter(block for table in tables for block in table)
        return [block for block, count in counts.items() if self.refs[block] == count]

    def cache(self, block: int, key: bytes, owner: str, parent: bytes | None) -> None:
        """Enter a held, fully computed block in the prefix cache. A key that is already cached
        keeps its first block, so that block tables only ever grow. A block whose parent is not
        cached cannot be found, so it is not entered."""
        if self.keys[block] is not None or key in self._index:
            return
        if parent is not None:
            if parent not in self._index:
                return
            self._children.setdefault(parent, set()).add(key)
        self.keys[block] = key
        self._parents[block] = parent
        self.owners[block] = owner
        self._index[key] = block
        if self.fresh is not None and len(self.fresh) < _MAX_FRESH:
            self.fresh.append((block, key))
        if self.events is not None:
            self.events.append(KvEvent("stored", [key.hex()], parent.hex() if parent else None))

    def cached_blocks(self, owner: str) -> int:
        """Idle cached blocks of one tenant."""
        return self._idle.count(owner)

    def _take(self, owner: str, force: bool) -> int:
        if self._free:
            block = self._free.pop()
        else:
            victim = self._idle.victim(owner, force)
            if victim is None:
                raise IntegrityError("the pool counts an available block that it does not have")
            block = victim
            self._idle.remove(block)
            self._forget(block)
        self.refs[block] = 1
        return block

    def _forget(self, block: int) -> None:
        """Remove a block's key, and those of the blocks after it, which could no longer be found."""
        lost = [block]
        while lost:
            block = lost.pop()
            key, parent = self.keys[block], self._parents[block]
            if key is None:
                continue
            del self._index[key]
            self.keys[block] = self._parents[block] = None
            if parent in self._children:
                self._children[parent].discard(key)
                if not self._children[parent]:
                    del self._children[parent]
            self._lost_key(block)
            if block in self._idle:
                self._idle.remove(block)
                self._freed(block)
            if self.events is not None:
                self.events.append(KvEvent("removed", [key.hex()]))
            lost += [self._index[child] for child in self._children.get(key, ())]

    def _freed(self, block: int) -> None:
        self._free.append(block)

    def _lost_key(self, block: int) -> None:
        pass

    def _numbered(self) -> int:
        """Numbers that are blocks, free ones included."""
        return len(self.refs)

    def check_integrity(self, held: Iterable[int]) -> None:
        """`held` lists every block of every sequence and adapter, once per holder."""
        expected = Counter(held)
        for block in range(len(self.refs)):
            if self.refs[block] != expected[block]:
                raise IntegrityError(
                    f"block {block} counts {self.refs[block]} holders, has {expected[block]}"
                )
            key = self.keys[block]
            if key is not None and self._index.get(key) != block:
                raise IntegrityError(f"block {block} has a key that is not in the index")
            parent = self._parents[block]
            if parent is not None and parent not in self._index:
                raise IntegrityError(f"block {block} is cached although its parent is not")
            if (block in self._idle) != (key is not None and self.refs[block] == 0):
                raise IntegrityError(f"block {block} is idle although it must not be, or reversed")
        in_use = sum(1 for count in self.refs if count)
        if len(self._free) + len(self._idle) + in_use != self._numbered():
            raise IntegrityError(
                f"{len(self._free)} free, {len(self._idle)} idle and {in_use} held blocks do not "
                f"sum to {self._numbered()}"
            )
        if len(set(self._free)) != len(self._free):
            raise IntegrityError("a block is in the free list twice")
        if sum(key is not None for key in self.keys) != len(self._index):
            raise IntegrityError("the prefix index has keys that no block has")
