"""Blocks in two parts: one for layers with a window, which goes when the window has passed it, and the
rest for all other layers.

Both take their memory from one budget. A sequence's table, the prefix index and adapters name blocks as
always; a block's part lies elsewhere, and a block may be without one. On a CPU, whose memory is given
back to the system, the budget counts layers of a block, and parts lie in slots of their own. On a GPU,
whose memory stays, it counts pages of as many layers each: the rest of a block is the page with its
number, its part is one page or several. The idea that layers of one kind give up memory apart from the
others, and that of pages of one size, are those of vLLM's hybrid KV cache manager, that one number of a
block leads to the other memory of SGLang's SWA pool.
"""

from collections.abc import Iterable, Sequence

from engine.cache.blocks import BlockPool
from engine.cache.idle_blocks import IdleBlocks
from engine.cache.parts import Windowed
from engine.config import EngineConfig
from engine.errors import IntegrityError

_MOST_TRIED = 512  # ends of a cached prefix that are tried for one whose window is cached


class WindowedPool(BlockPool):
    """A block pool whose blocks have parts. A part is free, idle (of a cached block, and no holder's
    window reaches it) or held; only a held or cached block has one."""

    windowed: Windowed

    def __init__(
        self, windowed: Windowed, block_size: int, *, floor: int = 0, cap: int | None = None
    ) -> None:
        super().__init__(windowed.numbers, block_size, floor=floor, cap=cap)
        self.windowed = windowed
        self.num_blocks = windowed.blocks
        self._both = windowed.rest + windowed.part
        self._units = windowed.blocks * self._both  # of memory that nothing uses
        self._slots = windowed.slots
        self._slots[:] = [-1] * windowed.numbers
        windowed.pages[:] = -1
        self.part_refs = [0] * windowed.numbers
        slots = 0 if windowed.page else windowed.blocks
        self._free_slots = list(range(slots - 1, -1, -1))
        half = windowed.blocks // 2
        self._idle = IdleBlocks(floor, cap, floor_total=half)
        self._idle_parts = IdleBlocks(floor, None, floor_total=half)
        # When each became idle: the older of block and part is evicted.
        self._idle_since = [0] * windowed.numbers
        self._part_idle_since = [0] * windowed.numbers
        self._now = 0
        # How many of the last free slots, and free blocks, still have memory of the system.
        self._warm_slots = self._warm_blocks = 0

    @property
    def free_blocks(self) -> int:
        rest, part = self.windowed.rest, self.windowed.part
        return (self._units + len(self._idle) * rest + len(self._idle_parts) * part) // self._both

    def available(self, owner: str, force: bool = False) -> int:
        return self._usable(owner, force) // self._both

    def parts_available(self, owner: str, force: bool = False) -> int:
        """Parts that blocks without one can get."""
        return self._usable(owner, force) // self.windowed.part

    def whole(self, blocks: int, parts: int = 0) -> int:
        more = min(blocks, max(1, self.windowed.most_parts(self.block_size) - parts))
        return -(-(blocks * self.windowed.rest + more * self.windowed.part) // self._both)

    def without_parts(self, blocks: int) -> int:
        return blocks * self.windowed.rest // self._both

    def allocate(
        self, count: int, owner: str, force: bool = False, *, bare: bool = False
    ) -> list[int] | None:
        """Whole blocks, their parts held too, or `bare` ones, without parts."""
        if count * (self.windowed.rest if bare else self._both) > self._usable(owner, force):
            return None
        blocks = [self._take(owner, force) for _ in range(count)]
        if not bare:
            self._give_parts(blocks, owner, force)
        return blocks

    def add_parts(self, blocks: Sequence[int], owner: str, force: bool = False) -> bool:
        """Give each of these blocks, which have none, a part that is held once. False, and no
        change, where there is too little memory."""
        if len(blocks) * self.windowed.part > self._usable(owner, force):
            return False
        self._give_parts(blocks, owner, force)
        return True

    def share_parts(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._slots[block] < 0:
                raise IntegrityError(f"block {block} has lost its part between look-up and use")
            if self.part_refs[block] == 0:
                self._idle_parts.remove(block)
            self.part_refs[block] += 1

    def release_parts(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.part_refs[block] -= 1
            if self.part_refs[block] > 0:
                continue
            if self.part_refs[block] < 0:
                raise IntegrityError(f"the part of block {block} was released too often")
            if self.keys[block] is None:
                self._drop_part(block)
                continue
            self._idle_parts.add(block, self.owners[block])
            self._part_idle_since[block] = self._tick()

    def release(self, blocks: Iterable[int]) -> None:
        """The last holder of a block gives its part back with it."""
        for block in blocks:
            if self.refs[block] == 1 and self.part_refs[block] > 0:
                self.release_parts([block])
            super().release([block])
            if block in self._idle:
                self._idle_since[block] = self._tick()

    def release_table(self, blocks: Sequence[int], parts: Sequence[int]) -> None:
        held = set(parts)
        for block in blocks:
            if block in held:
                self.release_parts([block])
            self.release([block])

    def part_copies(self, copies: list[tuple[int, int]]) -> list[tuple[int, int]]:
        part_of = self.windowed.part_of
        return [pair for a, b in copies for pair in zip(part_of(a), part_of(b), strict=True)]

    def freed_by(self, tables: Iterable[list[int]]) -> int:
        freed = self._freed_by(tables)
        parts = sum(self.part_refs[block] > 0 for block in freed)
        return (len(freed) * self.windowed.rest + parts * self.windowed.part) // self._both

    def with_window(self, keys: list[bytes], count: int) -> int:
        """The most of the first `count` keys, all cached, after which a sequence can go on: the parts
        that its next position sees are cached too."""
        low_end = max(0, count - _MOST_TRIED)
        end = at = count
        while end > low_end:
            first = self._first_seen(end)
            while at > first and self._slots[self._index[keys[at - 1]]] >= 0:
                at -= 1
            if at <= first:
                return end
            end = at = at - 1
        return 0

    def seen_parts(self, count: int, position: int) -> range:
        """Which of a sequence's first `count` blocks need parts for what comes from `position` on."""
        first = self.windowed.sight.unread_blocks(position, self.block_size).stop
        return range(min(first, count), count)

    def cache(self, block: int, key: bytes, owner: str, parent: bytes | None) -> None:
        """A cached block that has lost its part gives its place to one that has one."""
        known = self._index.get(key)
        if known is None or self._slots[known] >= 0:
            super().cache(block, key, owner, parent)
        elif self._slots[block] >= 0 and self.keys[block] is None:
            self.keys[known], self.keys[block] = None, key
            self._parents[known], self._parents[block] = None, self._parents[known]
            self.owners[block] = self.owners[known]
            self._index[key] = block
            if known in self._idle:
                self._idle.remove(known)
                self._freed(known)

    def _first_seen(self, count: int) -> int:
        return self.seen_parts(count, count * self.block_size).start

    def _usable(self, owner: str, force: bool) -> int:
        """Units of memory that an allocation for `owner` may take."""
        idle = self._idle.usable_by(owner, force) * self.windowed.rest
        return self._units + idle + self._idle_parts.usable_by(owner, force) * self.windowed.part

    def _take(self, owner: str, force: bool) -> int:
        self._make_room(self.windowed.rest, owner, force)
        block = self._free.pop()
        self._warm_blocks = max(0, self._warm_blocks - 1)
        self.refs[block] = 1
        self._cool()
        return block

    def _give_parts(self, blocks: Sequence[int], owner: str, force: bool) -> None:
        for block in blocks:
            if self._slots[block] >= 0:
                raise IntegrityError(f"block {block} has a part already")
            self._make_room(self.windowed.part, owner, force)
            self._place_part(block)
            self.part_refs[block] = 1
            self._cool()

    def _place_part(self, block: int) -> None:
        self._slots[block] = self._free_slots.pop()
        self._warm_slots = max(0, self._warm_slots - 1)

    def _make_room(self, units: int, owner: str, force: bool) -> None:
        """Evict what has been idle longest, until so much memory is free; then take it."""
        while self._units < units:
            block = self._idle.victim(owner, force)
            part = self._idle_parts.victim(owner, force)
            if part is not None and (
                block is None or self._part_idle_since[part] < self._idle_since[block]
            ):
                self._drop_part(part)
            elif block is not None:
                self._idle.remove(block)
                self._forget(block)
                self._freed(block)
            else:
                raise IntegrityError("the pool counts available memory that it does not have")
        self._units -= units

    def _cool(self) -> None:
        """List free slots and blocks as cold while all that have memory exceed the budget."""
        rest, part = self.windowed.rest, self.windowed.part
        cold_slots, cold_blocks = self.windowed.cold
        while self._warm_slots * part + self._warm_blocks * rest > self._units:
            if self._warm_slots:
                cold_slots.append(self._free_slots[-self._warm_slots])
                self._warm_slots -= 1
            else:
                cold_blocks.append(self._free[-self._warm_blocks])
                self._warm_blocks -= 1

    def _freed(self, block: int) -> None:
        super()._freed(block)
        self._units += self.windowed.rest
        self._warm_blocks += 1
        if self._slots[block] >= 0:
            self._drop_part(block)

    def _lost_key(self, block: int) -> None:
        if self._slots[block] >= 0 and self.part_refs[block] == 0:
            self._drop_part(block)

    def _drop_part(self, block: int) -> None:
        if block in self._idle_parts:
            self._idle_parts.remove(block)
        self._lift_part(block)
        self._slots[block] = -1
        self._units += self.windowed.part

    def _lift_part(self, block: int) -> None:
        self._free_slots.append(self._slots[block])
        self._warm_slots += 1

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def check_parts(self, held: Iterable[int]) -> None:
        """`held` lists every block whose part is held, once per holder."""
        counts: dict[int, int] = {}
        for block in held:
            counts[block] = counts.get(block, 0) + 1
        with_parts = [block for block, slot in enumerate(self._slots) if slot >= 0]
        for block, count in enumerate(self.part_refs):
            if count != counts.get(block, 0):
                raise IntegrityError(
                    f"the part of block {block} counts {count} holders, has {counts.get(block, 0)}"
                )
            idle = self._slots[block] >= 0 and count == 0
            if (block in self._idle_parts) != idle or (idle and self.keys[block] is None):
                raise IntegrityError(f"the part of block {block} is idle or held, not both")
            if count and self._slots[block] < 0:
                raise IntegrityError(f"block {block} has no part, though it is held")
        self._check_places(with_parts)
        used = (self._numbered() - len(self._free)) * self.windowed.rest
        used += len(with_parts) * self.windowed.part
        if used + self._units != self.windowed.blocks * self._both:
            raise IntegrityError(
                f"{used} units are in use and {self._units} free: they do not add up"
            )

    def _check_places(self, blocks: list[int]) -> None:
        """Of these blocks' parts."""
        slots = [self._slots[block] for block in blocks]
        if sorted(slots + self._free_slots) != list(range(self.windowed.blocks)):
            raise IntegrityError("a slot is lost, or belongs to two blocks")


class PagedPool(WindowedPool):
    """All memory is pages, numbered like blocks: a free one becomes a block, or a page of a part. No
    memory is given back, so that nothing is cold."""

    def _place_part(self, block: int) -> None:
        pages = self.windowed.pages[block]
        pages[:] = [self._free.pop() for _ in pages]
        self._slots[block] = int(pages[0])

    def _lift_part(self, block: int) -> None:
        self._free += self.windowed.pages[block].tolist()
        self.windowed.pages[block] = -1

    def _cool(self) -> None:
        pass

    def _numbered(self) -> int:
        return len(self.refs) - int((self.windowed.pages >= 0).sum())

    def _check_places(self, blocks: list[int]) -> None:
        pages = self.windowed.pages
        of_parts = pages[blocks].reshape(-1).tolist()
        alone = [block for block, count in enumerate(self.refs) if count or block in self._idle]
        if sorted(of_parts + alone + self._free) != list(range(self.windowed.numbers)):
            raise IntegrityError("a page is lost, or has two uses")
        if (pages >= 0).sum() != len(of_parts) or self._units != len(self._free):
            raise IntegrityError("pages are counted that no block has")


def open_pool(config: EngineConfig, blocks: int, windowed: Windowed | None) -> BlockPool:
    """The pool for a runner's memory."""
    floor, cap = config.cache_floor_blocks, config.cache_cap_blocks
    if windowed is None:
        return BlockPool(blocks, config.block_size, floor=floor, cap=cap)
    kind = PagedPool if windowed.page else WindowedPool
    return kind(windowed, config.block_size, floor=floor, cap=cap)
