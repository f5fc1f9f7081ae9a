"""Where the parts of blocks lie that layers with a window have (`engine.cache.windowed`), and which
models have such parts."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.model_spec import ModelSpec, Sight

_MOST_WASTED = 1 / 8  # share of a block's layers that rounding to pages may add


@dataclass(frozen=True, slots=True)
class Windowed:
    """Where the parts of blocks lie. The block pool writes `slots`, `pages` and `cold`, a runner reads
    them."""

    sight: Sight  # of the layers with a window: the widest
    layers: frozenset[int]  # with a window
    rest: int  # units of memory of a block without its part: the other layers, or one page
    blocks: int  # whole blocks that the budget holds: there are as many slots
    page: int = 0  # layers in a page; 0: a unit is a layer, and parts have slots of their own
    # Of each block's part, with pages the first of them; -1: it has none.
    slots: list[int] = field(default_factory=list)
    pages: NDArray[np.int32] = field(init=False, compare=False)  # [blocks, pages of a part]
    # Free (slots, blocks) whose memory is to be returned to the system, for the budget is in use
    # elsewhere.
    cold: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def __post_init__(self) -> None:
        """Until a block pool takes over, each of the first `blocks` has a part."""
        of_parts = np.arange(self.blocks, self.numbers if self.page else 0, dtype=np.int32)
        pages = np.full((self.numbers, self.part if self.page else 0), -1, np.int32)
        pages[: self.blocks] = of_parts.reshape(self.blocks, -1)
        object.__setattr__(self, "pages", pages)
        self.slots.extend(pages[: self.blocks, 0].tolist() if self.page else range(self.blocks))
        self.slots.extend([-1] * (self.numbers - self.blocks))

    @property
    def part(self) -> int:
        """Units of memory of a block's part."""
        return -(-len(self.layers) // self.page) if self.page else len(self.layers)

    @property
    def numbers(self) -> int:
        """Numbers of blocks: as many as there can be without parts."""
        return self.blocks * (self.rest + self.part) // self.rest

    @property
    def memory(self) -> int:
        """Of a whole block, in layers."""
        return (self.rest + self.part) * max(1, self.page)

    def part_of(self, block: int) -> list[int]:
        """Its slot, or its pages; none if the block has no part."""
        if self.slots[block] < 0:
            return []
        return self.pages[block].tolist() if self.page else [self.slots[block]]

    def places(self, layers: int) -> list[tuple[int, int]]:
        """Of each layer which piece of a block has it, 0 the rest, further ones those of the part, and
        where it lies in that."""
        found, counts = [], [0, 0]
        for layer in range(layers):
            kind = int(layer in self.layers)
            piece, at = divmod(counts[kind], self.page) if self.page else (0, counts[kind])
            counts[kind] += 1
            found.append((kind + piece, at))
        return found

    def covers(self, sight: Sight) -> bool:
        """Whether layers that see this keep their keys and values in parts."""
        return not sight.first and 0 < sight.window <= self.sight.window

    def most_parts(self, block_size: int) -> int:
        """That a sequence needs at once, to go on by a block."""
        return self.sight.window // block_size + 3

    def longest(self, blocks: int, block_size: int) -> int:
        """Positions of a sequence for which the memory of so many whole blocks is enough."""
        both, most = self.rest + self.part, self.most_parts(block_size)
        units = (blocks - 1) * both  # one is lost where the counts of several things are rounded
        more = max(0, units - most * both) // self.rest
        return (min(most, max(0, units) // both) + more) * block_size


def windowed_layers(spec: ModelSpec, blocks: int, in_pages: bool = False) -> Windowed | None:
    """None where all layers see as much, or those without a window of their own see less, or where
    rounding to pages would waste too much of short sequences' memory."""
    windows = {n: spec.windows[n] for n in range(spec.cached_layers)}
    layers = frozenset(n for n, window in windows.items() if window is not None)
    sight = Sight(max((window or 0 for window in windows.values()), default=0))
    if not layers or len(layers) == len(windows):
        return None
    if 0 < spec.kv_sight.window <= sight.window:
        return None
    rest, part = len(windows) - len(layers), len(layers)
    if not in_pages:
        return Windowed(sight, layers, rest, blocks)
    # The smallest pages, as a long sequence has little besides the rest of its blocks.
    for page in range(rest, max(rest, part) + 1):
        most = (1 + _MOST_WASTED) * (rest + part)
        if Windowed(sight, layers, 1, 1, page).memory <= most:
            return Windowed(sight, layers, 1, blocks, page)
    return None
