"""The reference for the paged attention kernel, in plain torch and float32, and the record of a
step that both use."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.mixed import Mix
from engine.backends.layers.alibi import Alibi
from engine.model_spec import AttentionShape, Sight


@dataclass(frozen=True, slots=True)
class Answers:
    """What answers see, of sequences whose prompts see all: `sight`, and blocks that a sequence's row in
    the tables has from `column` on: the answer's first position, how many blocks, `blocks` cells for
    them, and as many for their numbers in the sequence. No sequence has queries of both in a step."""

    sight: Sight
    column: int
    blocks: int


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The block tables of a step's sequences. Sequences that decode one token come first."""

    tables: Tensor  # [any rows, max blocks] int32: block numbers
    table_rows: Tensor  # [sequences] int32: the sequence's row in `tables`
    seq_lens: Tensor  # [sequences] int32: keys visible to the last query, this step's included
    cu_q: Tensor  # [sequences + 1] int32: start of each sequence's queries in the packed rows
    decodes: int  # number of leading sequences with exactly one query; with `mix`: any
    mix: Mix | None = None  # in a graph of steps with prompt chunks
    answers: Answers | None = None  # in layers without a window, if answers see less than prompts


def paged_attention_reference(
    q: Tensor,
    kv: Tensor,
    step: AttentionStep,
    shape: AttentionShape,
    scales: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    alibi: Alibi | None = None,
    rotated: int = 0,
) -> Tensor:
    """`q` is [tokens, heads, dim], `kv` [blocks, key heads and then value heads, block size, dim], and
    `scales` without the last dimension where `kv` has codes. `sinks` [heads]: a score of each head that
    belongs to no key. With `rotated` values, `kv` has one head of latent vectors, which are values too,
    but for the last ones."""
    if scales is not None:
        kv = (kv.float() * scales.float()[..., None]).to(q.dtype)
    out = torch.zeros_like(q[..., : q.shape[2] - rotated])
    if rotated:
        kv = kv.repeat(1, 2, 1, 1)
    group, page = 2 * q.shape[1] // kv.shape[1], kv.shape[2]
    bounds = step.cu_q.tolist()
    for i, length in enumerate(step.seq_lens.tolist()):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end:
            continue
        table = step.tables[int(step.table_rows[i])]
        both = _gather(kv, table, length).repeat_interleave(group, dim=0)
        keys, values = both.chunk(2)
        values = values[..., : out.shape[2]]
        score = torch.einsum("qhd,hkd->hqk", q[begin:end].float(), keys) * shape.scale
        if shape.softcap:
            score = shape.softcap * torch.tanh(score / shape.softcap)
        if alibi is not None:
            keys_at = torch.arange(length, device=q.device)
            score = score + alibi(keys_at[None], keys_at[-1:])[0][:, None]
        seen = _visible(end - begin, length, shape).to(q.device)
        if step.answers is not None:
            seen &= _visible_to_answer(end - begin, length, page, step.answers, table.tolist()).to(
                q.device
            )
        score = score.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, end - begin, 1)
            score = torch.cat((score, sink), -1)
        weight = score.softmax(-1)[..., :length]
        out[begin:end] = torch.einsum("hqk,hkd->qhd", weight, values).to(q.dtype)
    return out


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """[heads of the cache, length, dim] in float32."""
    page = cache.shape[2]
    blocks = table[: -(-length // page)].long()
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()


def _visible_to_answer(
    queries: int, length: int, page: int, answers: Answers, table: list[int]
) -> Tensor:
    position, key = torch.arange(length - queries, length)[:, None], torch.arange(length)
    start, count = table[answers.column], table[answers.column + 1]
    numbers = table[answers.column + 2 + answers.blocks :][:count]
    window, first = answers.sight
    stays = torch.isin(key // page, torch.tensor(numbers, dtype=torch.int64))
    return (position < start) | (key > position - window) | (key < first) | stays


def _visible(queries: int, length: int, shape: AttentionShape) -> Tensor:
    position = torch.arange(length - queries, length)[:, None]
    key = torch.arange(length)[None, :]
    seen = key <= position
    if not shape.window:
        return seen
    return seen & ((key > position - shape.window) | (key < shape.first))
