"""One step's tensors: prepared once, read by every layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import Row
from engine.layers.attention_plan import Geometry, Tile, plan_tiles
from engine.layers.lora import LoraStep
from engine.layers.rotary import RotaryTables


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Token rows in the order decodes, then prompt chunks; each group sorted by adapter."""

    tokens: torch.Tensor  # [tokens]
    cos: torch.Tensor  # [tokens, (heads + kv heads) * head_dim], as are all that is rotated
    sin: torch.Tensor
    blocks: torch.Tensor  # where each token's key and value go: [tokens]
    offsets: torch.Tensor
    tiles: dict[int | None, list[Tile]]  # by sliding window
    geometry: Geometry
    lora: LoraStep | None
    sampled: torch.Tensor  # token rows whose logits are wanted


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
    lora: LoraStep | None,
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
    ends = torch.tensor([len(row.tokens) for row in rows]).cumsum(0) - 1
    sampled = ends[torch.tensor([row.sample for row in rows])]
    return StepInputs(
        tokens=torch.tensor(tokens),
        cos=tables.cos.index_select(0, positions).repeat(1, rotated),
        sin=tables.sin.index_select(0, positions).repeat(1, rotated),
        blocks=torch.tensor(blocks),
        offsets=positions % size,
        tiles={window: plan_tiles(decodes, prefills, window, geometry) for window in windows},
        geometry=geometry,
        lora=lora,
        sampled=torch.arange(len(tokens)) if every_row else sampled,
    )
