"""The tiles of a step's attention on a CPU, planned once and used by every layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.backends.layers.kv import KvPool
from engine.batch import AnswerSight, Row
from engine.model_spec import Sight

_TILE_QUERIES = 64  # query tokens in one product
# Keys and values gathered for a product should still be in a core's cache when they are multiplied.
# Measured with 32 sequences on a 2-core machine with 2 MiB of L2 per core: a fifth faster than one
# product for all sequences.
_GATHER_BYTES = 1 << 20  # bytes per thread
_MIN_SEQUENCES = 4  # least sequences in one product, because each call has a fixed cost
# A row of few tokens, which verifies guesses, is multiplied with the decoding rows, token by token, if
# gathering its keys and values for each of them costs less than a product of its own (about 30 us).
_SPLIT_BYTES = 1 << 18


_Array = np.ndarray[Any, Any]


class _Query(NamedTuple):
    """A token that is multiplied with others, each with the keys and values of its own sequence."""

    number: int  # its row in the step
    position: int
    blocks: list[int]
    answer: AnswerSight | None = None  # where it does not see all


class Observed(NamedTuple):
    """Where the attention that a tile's queries from number `first` on give to each block is added."""

    sums: torch.Tensor  # [blocks] float32
    first: int
    block_size: int

    def add(self, weights: torch.Tensor) -> None:
        """weights: [key heads, group, queries, positions] of a tile that begins with the first block."""
        found = weights[:, :, self.first :].float().sum((0, 1, 2))
        by_block = found.view(-1, self.block_size).sum(1)
        self.sums[: len(by_block)] += by_block


@dataclass(frozen=True)
class Tile:
    """Queries that are multiplied together with one gathered set of keys and values.

    `rows`: the token rows of the step. `gather`: rows of the pool for the first layer of their kind,
    keys then values, always whole blocks, because a product of partial blocks would copy them first.
    `mask`, which `masked` makes where it is read, is added to the scores and broadcasts over [sequences *
    kv heads, group * queries, positions]. `keys`: the position of each key, [sequences, positions].
    `starts`, `newest`: those of each sequence's first key and last query.
    """

    rows: slice | torch.Tensor
    sequences: int
    queries: int
    gather: torch.Tensor
    positions: int
    masked: Callable[[], torch.Tensor | None]
    keys: torch.Tensor
    starts: torch.Tensor
    newest: torch.Tensor
    # For one query that sees a prefix of the positions: its length.
    prefix_length: int | None = None
    gaps: bool = False  # between the blocks that are gathered, other than those of a sight
    observed: Observed | None = None

    @cached_property
    def mask(self) -> torch.Tensor | None:
        return self.masked()


def plan_tiles(
    decodes: list[Row],
    prefills: list[Row],
    sight: Sight,
    pool: KvPool,
    sums: dict[int, torch.Tensor] | None = None,
) -> list[Tile]:
    """Tiles of a step whose flattened rows are `decodes`, one token each, then `prefills`.
    `sight`: of the layers that use the tiles. `sums`: those of `Observed`, by sequence."""
    queries: list[_Query] = []
    answers: list[_Query] = []
    tiles: list[Tile] = []
    first, splits = 0, len(decodes) + len(prefills) > 1
    for row in decodes + prefills:
        count = len(row.tokens)
        if row.answer is not None and row.position > row.answer.start:
            before = max(0, row.answer.start - row.start)
            for begin in range(0, before, _TILE_QUERIES):
                end = min(begin + _TILE_QUERIES, before)
                tiles.append(_prefill_tile(row, first, begin, end, sight, pool))
            answers += [
                _Query(first + n, row.start + n, row.blocks, row.answer)
                for n in range(before, count)
            ]
        elif sums is not None and row.observed is not None and row.position > row.observed:
            tiles += _observed_tiles(row, first, sight, pool, sums)
        elif count == 1:
            queries.append(_Query(first, row.start, row.blocks))
        elif splits and count * (row.start + count) * _position_bytes(pool) <= _SPLIT_BYTES:
            queries += [_Query(first + n, row.start + n, row.blocks) for n in range(count)]
        else:
            for begin in range(0, count, _TILE_QUERIES):
                end = min(begin + _TILE_QUERIES, count)
                tiles.append(_prefill_tile(row, first, begin, end, sight, pool))
        first += count
    tiles += [_answer_tile(part, pool) for part in _cut(answers, sight, pool)]
    if queries and pool.read_in_place and not sight.first:
        return [*tiles, _decode_tile(queries, sight, pool)]
    return tiles + [
        _decode_tile(part, sight, pool)
        for group in _by_length(queries)
        for part in _cut(group, sight, pool)
    ]


def _observed_tiles(
    row: Row, first: int, sight: Sight, pool: KvPool, sums: dict[int, torch.Tensor]
) -> list[Tile]:
    """Tiles of a prompt's chunk, some of whose queries are observed."""
    assert row.observed is not None
    if row.start <= row.observed:
        sums[row.seq] = torch.zeros(len(row.blocks))
    tiles = []
    for begin in range(0, len(row.tokens), _TILE_QUERIES):
        end = min(begin + _TILE_QUERIES, len(row.tokens))
        tile = _prefill_tile(row, first, begin, end, sight, pool)
        counted = max(0, row.observed - row.start - begin)
        if counted < end - begin:
            tile = replace(tile, observed=Observed(sums[row.seq], counted, pool.block_size))
        tiles.append(tile)
    return tiles


def _position_bytes(pool: KvPool) -> int:
    return pool.heads * pool.head_dim * pool.dtype.itemsize


def _by_length(queries: list[_Query]) -> list[list[_Query]]:
    """Groups of sequences, in which none is padded to more than twice its length."""
    ranked = sorted(queries, key=lambda query: -query.position)
    groups: list[list[_Query]] = []
    longest = 0
    for query in ranked:
        if not groups or 2 * (query.position + 1) < longest:
            groups.append([])
            longest = query.position + 1
        groups[-1].append(query)
    if len(groups) == 1:
        groups[0].sort(key=lambda query: query.number)
    return groups


def _cut(group: list[_Query], sight: Sight, pool: KvPool) -> list[list[_Query]]:
    """Parts whose gathered keys and values fit into the processor's cache."""
    longest = max((query.position + 1 for query in group), default=1)
    sequence_bytes = min(longest, sight.most or longest) * _position_bytes(pool)
    count = max(_MIN_SEQUENCES, _GATHER_BYTES * torch.get_num_threads() // sequence_bytes)
    return [group[first : first + count] for first in range(0, len(group), count)]


def _decode_tile(group: list[_Query], sight: Sight, pool: KvPool) -> Tile:
    size = pool.block_size
    numbers = [query.number for query in group]
    ends = np.array([query.position + 1 for query in group])
    begins = np.maximum(0, ends - sight.window) if sight.window else np.zeros_like(ends)
    leads, skips = _blocks_before(begins, sight, size)
    tables = [
        _places(query.blocks[:lead] + query.blocks[lead + skip : -(-end // size)], sight, pool)
        for query, lead, skip, end in zip(
            group, leads.tolist(), skips.tolist(), ends.tolist(), strict=True
        )
    ]
    width = max(len(table) for table in tables)
    padded = np.array([table + [table[0]] * (width - len(table)) for table in tables])
    key_positions = _positions(width, leads[:, None], skips[:, None], size)

    def masked() -> torch.Tensor | None:
        visible = key_positions < ends[:, None]
        visible &= (key_positions >= begins[:, None]) | (key_positions < sight.first)
        if visible.all():
            return None
        return _additive(visible, pool.dtype).repeat_interleave(pool.kv_heads, 0)[:, None]

    first, last = numbers[0], numbers[-1]
    neighbours = numbers == list(range(first, last + 1))
    return Tile(
        rows=slice(first, last + 1) if neighbours else torch.tensor(numbers),
        sequences=len(group),
        queries=1,
        gather=_gather(padded, sight, pool),
        positions=width * size,
        masked=masked,
        keys=torch.from_numpy(key_positions),
        starts=torch.from_numpy(key_positions[:, 0].copy()),
        newest=torch.from_numpy(ends - 1),
        prefix_length=int(ends[0]) if len(group) == 1 and not begins.any() else None,
    )


def _answer_tile(group: list[_Query], pool: KvPool) -> Tile:
    """Of queries that see their sight, and blocks in between that stay for them."""
    size = pool.block_size
    numbers = [_seen_blocks(query, size) for query in group]
    width = max(map(len, numbers))
    # A sequence of fewer blocks gathers its first one again, at positions behind its query.
    past = 1 + max(query.position for query in group) // size
    of_blocks = np.array([each + [past] * (width - len(each)) for each in numbers])
    tables = [
        [query.blocks[n] for n in each] + [query.blocks[each[0]]] * (width - len(each))
        for query, each in zip(group, numbers, strict=True)
    ]
    keys = (of_blocks[..., None] * size + np.arange(size)).reshape(len(group), -1)
    positions = np.array([query.position for query in group])[:, None]
    visible = keys <= positions
    for n, query in enumerate(group):
        assert query.answer is not None
        window, sinks = query.answer.sight
        between = (keys[n] >= sinks) & (keys[n] <= query.position - window)
        visible[n] &= ~between | np.isin(keys[n] // size, query.answer.blocks)
    mask = _additive(visible, pool.dtype).repeat_interleave(pool.kv_heads, 0)[:, None]
    return Tile(
        rows=torch.tensor([query.number for query in group]),
        sequences=len(group),
        queries=1,
        gather=_gather(np.array(tables), Sight(), pool),
        positions=width * size,
        masked=lambda: mask,
        keys=torch.from_numpy(keys),
        starts=torch.from_numpy(keys[:, 0].copy()),
        newest=torch.from_numpy(positions[:, 0].copy()),
        gaps=True,
    )


def _seen_blocks(query: _Query, size: int) -> list[int]:
    """The numbers of the blocks that it sees, in order."""
    assert query.answer is not None
    sight = query.answer.sight
    unread = sight.unread_blocks(query.position, size)
    last = query.position // size + 1
    stay = [number for number in query.answer.blocks if number in unread]
    return [*range(unread.start), *stay, *range(unread.stop, last)]


def _prefill_tile(row: Row, first: int, begin: int, end: int, sight: Sight, pool: KvPool) -> Tile:
    size, window = pool.block_size, sight.window
    low, high = row.start + begin, row.start + end
    oldest = max(0, low - window + 1) if window else 0
    leads, skips = _blocks_before(np.array([oldest]), sight, size)
    lead, skip = int(leads[0]), int(skips[0])
    table = _places(row.blocks[:lead] + row.blocks[lead + skip : -(-high // size)], sight, pool)
    key_positions = _positions(len(table), leads, skips, size)[0]
    queries = np.arange(low, high)[:, None]
    visible = key_positions <= queries
    if window:
        visible &= (key_positions > queries - window) | (key_positions < sight.first)
    return Tile(
        rows=slice(first + begin, first + end),
        sequences=1,
        queries=end - begin,
        gather=_gather(np.array([table]), sight, pool),
        positions=len(table) * size,
        masked=lambda: _additive(visible, pool.dtype).repeat(pool.group, 1)[None],
        keys=torch.from_numpy(key_positions)[None],
        starts=torch.from_numpy(key_positions[:1].copy()),
        newest=torch.tensor([high - 1]),
    )


def _blocks_before(begins: _Array, sight: Sight, size: int) -> tuple[_Array, _Array]:
    """Of sequences whose windows begin at `begins`: the blocks of their first positions that are seen
    too, and how many after these are not."""
    oldest = begins // size
    leads = np.minimum(oldest, -(-sight.first // size))
    return leads, oldest - leads


def _positions(width: int, leads: _Array, skips: _Array, size: int) -> _Array:
    """The position of each key in `width` blocks, `skips` of which are left out after `leads`:
    [sequences, positions]."""
    blocks = np.arange(width)
    blocks = blocks + np.where(blocks < leads, 0, skips)
    places: _Array = blocks[..., None] * size + np.arange(size)
    return places.reshape(-1, width * size)


def _additive(visible: _Array, dtype: torch.dtype) -> torch.Tensor:
    hidden = torch.from_numpy(~visible)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _places(blocks: list[int], sight: Sight, pool: KvPool) -> list[int]:
    """Where the keys and values of these blocks lie, for the layers that see this."""
    return pool.part_slots(blocks) if pool.in_parts(sight) else blocks


def _gather(tables: _Array, sight: Sight, pool: KvPool) -> torch.Tensor:
    """Pool rows of a first layer, ordered by key or value, sequence, head, block."""
    first = tables * pool.row_counts[pool.in_parts(sight)]
    heads = np.arange(pool.heads).reshape(-1, 1, pool.kv_heads, 1)
    return torch.from_numpy((first[None, :, None, :] + heads).ravel())
