"""One step's tensors: prepared once, read by every layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from engine.batch import Row
from engine.layers.attention_plan import Geometry, Tile, plan_tiles
from engine.layers.lora import LoraStep
from engine.layers.rotary import RotaryTables

PlanLora = Callable[[list[Row], list[Row]], LoraStep | None]


@dataclass(frozen=True, slots=True)
class Queries:
    """Token rows that ask: what they attend to, and their adapters."""

    rows: torch.Tensor | None  # which of the step; None is all
    tiles: dict[int | None, list[Tile]]  # by sliding window
    lora: LoraStep | None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Token rows in the order decodes, then prompt chunks; each group sorted by adapter.

    Beyond its keys and values, the last layer is computed for the sampled rows alone.
    """

    tokens: torch.Tensor  # [tokens]
    cos: torch.Tensor  # [tokens, (heads + kv heads) * head_dim], as are all that is rotated
    sin: torch.Tensor
    cells: torch.Tensor  # where each token's keys and values go: [tokens, 2 * kv heads]
    geometry: Geometry
    every: Queries
    sampled: Queries | None  # whose logits are wanted


def ordered(
    rows: list[Row], place: Callable[[Row], tuple[int, int]] | None = None
) -> tuple[list[Row], list[Row]]:
    """(rows of one token, longer rows), each sorted by the place of the row's adapter: its slot,
    if nothing else is given."""
    place = place or _by_slot
    decodes = sorted((row for row in rows if len(row.tokens) == 1), key=place)
    prefills = sorted((row for row in rows if len(row.tokens) > 1), key=place)
    return decodes, prefills


def _by_slot(row: Row) -> tuple[int, int]:
    return (0, 0) if row.adapter is None else (1, row.adapter.slot)


def step_inputs(
    decodes: list[Row],
    prefills: list[Row],
    tokens: list[int],
    tables: RotaryTables,
    windows: set[int | None],
    geometry: Geometry,
    plan_lora: PlanLora,
    every_row: bool = False,
) -> StepInputs:
    """`every_row` asks for the logits of every token, not only of those that are sampled."""
    size = geometry.block_size
    rotated = geometry.kv_heads * (geometry.group + 1)
    rows = decodes + prefills
    places = [p for row in rows for p in range(row.start, row.start + len(row.tokens))]
    blocks = [
        row.blocks[p // size] for row in rows for p in range(row.start, row.start + len(row.tokens))
    ]
    positions = torch.tensor(places)
    every = Queries(
        None,
        {window: plan_tiles(decodes, prefills, window, geometry) for window in windows},
        plan_lora(decodes, prefills),
    )
    asked = sum(row.sample for row in rows)
    sampled: Queries | None = every
    if not every_row and asked < len(tokens):
        sampled = _sampled(decodes, prefills, windows, geometry, plan_lora) if asked else None
    return StepInputs(
        tokens=torch.tensor(tokens),
        cos=tables.cos.index_select(0, positions).repeat(1, rotated),
        sin=tables.sin.index_select(0, positions).repeat(1, rotated),
        cells=_cells(torch.tensor(blocks), positions % size, geometry),
        geometry=geometry,
        every=every,
        sampled=sampled,
    )


def _cells(blocks: torch.Tensor, offsets: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """In layer 0; see `KvPool`."""
    first = blocks * (geometry.layers * geometry.pool_heads)
    heads = first[:, None] + torch.arange(geometry.pool_heads)
    return heads * geometry.block_size + offsets[:, None]


def _sampled(
    decodes: list[Row],
    prefills: list[Row],
    windows: set[int | None],
    geometry: Geometry,
    plan_lora: PlanLora,
) -> Queries:
    """The last token of every row that is sampled, each a row that decodes."""
    ends = list(accumulate(len(row.tokens) for row in decodes + prefills))
    which = [end - 1 for end, row in zip(ends, decodes + prefills, strict=True) if row.sample]
    first, then = (
        [
            replace(r, tokens=r.tokens[-1:], start=r.start + len(r.tokens) - 1)
            for r in part
            if r.sample
        ]
        for part in (decodes, prefills)
    )
    return Queries(
        torch.tensor(which),
        {window: plan_tiles(first + then, [], window, geometry) for window in windows},
        plan_lora(first, then),
    )
