"""The tensors of a step on a CPU: prepared once, read by every layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch

from engine.backends.layers.attention_plan import Tile, plan_tiles
from engine.backends.layers.kv import KvPool
from engine.backends.layers.lora import LoraStep
from engine.backends.layers.rotary import RotaryTables
from engine.batch import LAST_SAMPLED, Row
from engine.model_spec import Sight

PlanLora = Callable[[list[Row], list[Row]], LoraStep | None]


@dataclass(frozen=True, slots=True)
class Queries:
    """Token rows whose output is computed, with their attention tiles and adapters."""

    rows: torch.Tensor | None  # row numbers in the step; None: all rows
    tiles: dict[Sight, list[Tile]]  # by what the layer sees
    lora: LoraStep | None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Token rows: first decodes, then prompt chunks, each sorted by adapter.

    Beyond its keys and values, the last layer is computed only for the sampled rows.
    """

    tokens: torch.Tensor  # [tokens]
    angles: list[RotaryTables]  # by number of the rope: [tokens, (heads + kv heads) * head_dim]
    # KV slots of each token's keys and values, [tokens, cached heads], by the kind of layer
    # (`KvPool.kinds`).
    kv_slots: list[torch.Tensor]
    all_rows: Queries
    sampled: Queries | None  # rows whose logits or states are wanted
    # Of these, the rows whose states are pooled, and those whose logits are computed; None: all are.
    pooled: tuple[torch.Tensor, torch.Tensor] | None = None


def order_rows(
    rows: list[Row], sort_key: Callable[[Row], tuple[int, int]] | None = None
) -> tuple[list[Row], list[Row]]:
    """(rows of one token, longer rows), each sorted by the key `sort_key`: by default the slot of the
    row's adapter."""
    sort_key = sort_key or _by_slot
    decodes = sorted((row for row in rows if len(row.tokens) == 1), key=sort_key)
    prefills = sorted((row for row in rows if len(row.tokens) > 1), key=sort_key)
    return decodes, prefills


def _by_slot(row: Row) -> tuple[int, int]:
    return (0, 0) if row.adapter is None else (1, row.adapter.slot)


def clear_unwritten(pool: KvPool, rows: list[Row]) -> None:
    """Clears the rest of every block that these rows begin and do not fill: its last holder's keys
    and values."""
    for row in rows:
        end = row.start + len(row.tokens)
        last, filled = divmod(end, pool.block_size)
        if filled and last * pool.block_size >= row.start:
            pool.clear(row.blocks[last], filled)


def token_ids(rows: list[Row], last: Callable[[int], int]) -> list[int]:
    """The id of every token. `last(row number)` replaces `LAST_SAMPLED`: the last sampled id of the
    row's sequence."""
    tokens = [token for row in rows for token in row.tokens]
    if LAST_SAMPLED in tokens:
        owners = [number for number, row in enumerate(rows) for _ in row.tokens]
        tokens = [
            last(number) if token == LAST_SAMPLED else token
            for number, token in zip(owners, tokens, strict=True)
        ]
    return tokens


def sampled_tokens(rows: list[Row]) -> list[int]:
    """The numbers, in the step, of the tokens whose logits are wanted."""
    starts = accumulate((len(row.tokens) for row in rows), initial=0)
    return [start + n for start, row in zip(starts, rows, strict=False) for n in _wanted(row)]


def _wanted(row: Row) -> Sequence[int]:
    return row.pooled_tokens if row.sampling.pooling else row.logit_tokens


def pooled_outputs(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The numbers of the pooled tokens and of the others, among those of `sampled_tokens`."""
    if not any(row.sampling.pooling for row in rows):
        return None
    of_pooled = [bool(row.sampling.pooling) for row in rows for _ in _wanted(row)]
    marks = torch.tensor(of_pooled, dtype=torch.bool)
    return marks.nonzero()[:, 0], (~marks).nonzero()[:, 0]


def positions_and_slots(
    decodes: list[Row], prefills: list[Row], block_size: int
) -> tuple[list[int], list[int]]:
    """The position and KV slot of every token; a slot is block * block size + offset."""
    positions = [row.start for row in decodes]
    slots = [
        row.blocks[row.start // block_size] * block_size + row.start % block_size
        for row in decodes
    ]  # fmt: skip
    for row in prefills:
        end = row.start + len(row.tokens)
        at = np.arange(row.start, end)
        positions += at.tolist()
        first = row.start // block_size
        table = np.asarray(row.blocks[first : -(-end // block_size)])
        slots += (table[at // block_size - first] * block_size + at % block_size).tolist()
    return positions, slots


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Builds the tensors of a step for one model and its KV pool."""

    pool: KvPool
    tables: list[RotaryTables]
    sights: set[Sight]  # of the model's layers
    plan_lora: PlanLora
    sums: dict[int, torch.Tensor] = field(default_factory=dict)  # see `attention_plan.Observed`

    def __call__(
        self,
        decodes: list[Row],
        prefills: list[Row],
        tokens: list[int],
        all_logits: bool = False,
    ) -> StepInputs:
        """With `all_logits` the logits of all tokens are computed, not only of sampled rows."""
        rotated = self.pool.kv_heads * (self.pool.group + 1)
        position_ids, slots = positions_and_slots(decodes, prefills, self.pool.block_size)
        positions = torch.tensor(position_ids)
        all_rows = Queries(None, self._tiles(decodes, prefills), self.plan_lora(decodes, prefills))
        sampled_count = sum(
            row.scored + row.sampled_tokens + len(row.pooled_tokens) for row in decodes + prefills
        )
        sampled: Queries | None = all_rows
        if not all_logits and sampled_count < len(tokens):
            sampled = self._sampled(decodes, prefills) if sampled_count else None
        return StepInputs(
            tokens=torch.tensor(tokens),
            angles=[
                replace(
                    table,
                    cos=table.cos.index_select(0, positions).repeat(1, rotated),
                    sin=table.sin.index_select(0, positions).repeat(1, rotated),
                )
                for table in self.tables
            ],
            kv_slots=self._kv_slots(slots),
            all_rows=all_rows,
            sampled=sampled,
            pooled=pooled_outputs(decodes + prefills),
        )

    def _kv_slots(self, slots: list[int]) -> list[torch.Tensor]:
        """KV slots in the first layer of each kind, [tokens, cached heads]; see `KvPool`."""
        size = self.pool.block_size
        heads, places = np.arange(self.pool.heads), np.array(slots, dtype=np.int64)
        blocks, offsets = places // size, (places % size)[:, None]
        found = []
        for kind, rows in enumerate(self.pool.row_counts[: 1 + max(self.pool.kinds)]):
            numbers = np.array(self.pool.part_slots(blocks.tolist()), np.int64) if kind else blocks
            found.append(torch.from_numpy(((numbers * rows)[:, None] + heads) * size + offsets))
        return found

    def _sampled(self, decodes: list[Row], prefills: list[Row]) -> Queries:
        """The sampled tokens of every row, each as a row of one token."""
        which = sampled_tokens(decodes + prefills)
        first, then = (
            [
                replace(
                    r,
                    tokens=r.tokens[n : n + 1],
                    start=r.start + n,
                    drafts=0,
                    scored=0,
                    observed=None,
                )
                for r in part
                for n in _wanted(r)
            ]
            for part in (decodes, prefills)
        )
        return Queries(
            torch.tensor(which), self._tiles(first + then, []), self.plan_lora(first, then)
        )

    def _tiles(self, decodes: list[Row], prefills: list[Row]) -> dict[Sight, list[Tile]]:
        return {
            sight: plan_tiles(decodes, prefills, sight, self.pool, self.sums)
            for sight in self.sights
        }
