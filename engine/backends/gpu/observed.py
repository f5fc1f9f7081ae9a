"""Attention mass per KV block from the last prompt queries (SnapKV), by torch, and by the kernel of
attention (`engine.scheduling.eviction` says what for)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backends.layers.operations import Attention
from engine.backends.layers.transfer import on_device
from engine.batch import Row, Sampled

_MOST_SCORES = 1 << 24  # of a layer that are in memory at once
OBSERVING_BYTES = (
    8 * 4 * _MOST_SCORES
)  # that observing may take: scores, shares and keys in float32


@dataclass(frozen=True, slots=True)
class Observed:
    """The queries of one sequence that a step observes, and where what they give is added."""

    rows: slice  # of the step's tokens
    first: int  # the position of the first of them
    blocks: Tensor  # [blocks] int64: of the sequence, up to the last of them
    sums: Tensor  # [blocks of the prompt] float32

    def add(self, q: Tensor, kv: Tensor, scales: Tensor | None, attention: Attention) -> None:
        """`q` [tokens, heads, dim], `kv` and `scales` as `paged_attention` has them. Adds the shares of
        each block, over all heads and observed queries."""
        queries, page = q[self.rows].float().transpose(0, 1), kv.shape[2]
        heads, count, dim = queries.shape
        key_heads, positions = max(1, kv.shape[1] // 2), len(self.blocks) * page
        group = heads // key_heads
        at = torch.arange(positions, device=q.device)
        hidden = at > self.first + torch.arange(count, device=q.device)[:, None]
        biases = None
        if attention.alibi is not None:
            biases = attention.alibi(at[None], at[-1:])[0].view(key_heads, group, 1, positions)
        asked = queries.reshape(key_heads, group, count, dim)
        most = max(1, _MOST_SCORES // (count * positions))  # query heads at once
        few, part = max(1, most // group), min(most, group)  # key heads, and of each
        for first in range(0, key_heads, few):
            some = slice(first, min(first + few, key_heads))  # values stand behind
            keys = _keys(kv[:, some], _some(scales, some), self.blocks)
            for begin in range(0, group, part):
                of_keys = some, slice(begin, begin + part)
                scores = torch.bmm(asked[of_keys].flatten(1, 2), keys)
                scores = scores.view(len(keys), -1, count, positions) * attention.shape.scale
                if attention.shape.softcap:
                    scores = (scores / attention.shape.softcap).tanh_() * attention.shape.softcap
                if biases is not None:
                    scores += biases[of_keys]
                given = scores.masked_fill_(hidden, float("-inf")).softmax(-1).sum((0, 1, 2))
                self.sums[: len(self.blocks)] += given.view(-1, page).sum(1)


def _some(scales: Tensor | None, heads: slice) -> Tensor | None:
    return None if scales is None else scales[:, heads]


def _keys(kv: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    """[key heads, dim, positions] float32"""
    if scales is None:
        found = kv.index_select(0, blocks).float()
    else:
        codes = kv.view(torch.uint8).index_select(0, blocks).view(kv.dtype).float()
        found = codes * scales.index_select(0, blocks).float()[..., None]
    return found.transpose(0, 1).flatten(1, 2).transpose(1, 2)


class Observations:
    """Of all sequences whose prompts are observed, until their first token is sampled."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._size = block_size
        self._device = device
        self._sums: dict[int, Tensor] = {}

    def of(self, rows: Sequence[Row]) -> tuple[Observed, ...]:
        """Of the rows of a step, in their order."""
        found, end = [], 0
        for row in rows:
            begin, end = end, end + len(row.tokens)
            if row.observed is None or row.position <= row.observed:
                continue
            if row.start <= row.observed:
                self._sums[row.seq] = torch.zeros(len(row.blocks), device=self._device)
            before = max(0, row.observed - row.start)
            blocks = row.blocks[: -(-row.position // self._size)]
            found.append(
                Observed(
                    slice(begin + before, end),
                    row.start + before,
                    on_device(blocks, self._device),
                    self._sums[row.seq],
                )
            )
        return tuple(found)

    def take(self, rows: Sequence[Row]) -> dict[int, Tensor]:
        """What was observed of the sequences that are sampled now, on its way to the host."""
        seqs = [row.seq for row in rows if row.seq in self._sums]
        return {seq: _to_host(self._sums.pop(seq)) for seq in seqs}

    def forget(self, seq: int) -> None:
        self._sums.pop(seq, None)


def _to_host(sums: Tensor) -> Tensor:
    if sums.device.type == "cpu":
        return sums
    host = torch.empty(sums.shape, pin_memory=True)
    return host.copy_(sums, non_blocking=True)


def with_attention(sampled: list[Sampled], taken: dict[int, Tensor]) -> list[Sampled]:
    """With what was observed of their prompts, if anything; it is on the host by now."""
    return [
        replace(each, attention=taken[each.seq].tolist()) if each.seq in taken else each
        for each in sampled
    ]


def one_sight_each(rows: Sequence[Row]) -> list[Row]:
    """Rows of a prompt and of its answer, which sees less, cut in two."""
    found = []
    for row in rows:
        before = 0 if row.answer is None else row.answer.start - row.start
        if not 0 < before < len(row.tokens):
            found.append(row)
            continue
        tokens, start = row.tokens, row.start
        found.append(replace(row, tokens=tokens[:before], sample=False, drafts=0))
        found.append(replace(row, tokens=tokens[before:], start=start + before))
    return found
