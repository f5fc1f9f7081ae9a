"""The kernels of latent attention against their references on the real device, at DeepSeek's sizes."""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_chunks import chunk_rows_for, sort_into_chunks
from engine.backends.gpu.adapters.lora_reference import UNIT, LoraSite, LoraStep
from engine.backends.gpu.attention_launch import paged_attention
from engine.backends.gpu.attention_reference import AttentionStep, paged_attention_reference
from engine.backends.gpu.latent.launch import Rows, by_head, place_latent
from engine.backends.gpu.latent.reference import by_head_reference, place_latent_reference
from engine.backends.gpu.pointwise_reference import RotaryStep
from engine.backends.layers.norm import RmsNorm
from engine.model_spec import AttentionShape

PLAIN, VALUE, LATENT, ROTATED = 128, 128, 512, 64
Pair = tuple[Tensor, Tensor]


def latent(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    for heads in (16, 128):
        yield from _attention(heads, dtype)
        yield from _placing(heads, dtype)
        yield from _by_head(heads, dtype)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def _attention(heads: int, dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    for queries, contexts in (([1] * 4, [700, 0, 15, 2000]), ([1, 130, 7], [65, 0, 513])):
        lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
        pages = [-(-n // 16) for n in lengths]
        data = _random(sum(pages), 1, 16, LATENT + ROTATED, dtype=dtype)
        tables = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        order = torch.randperm(sum(pages)).int()
        for i, (first, n) in enumerate(zip([0, *accumulate(pages)], pages, strict=False)):
            tables[i, :n] = order[first : first + n]
        rows, lens = torch.arange(len(pages)), torch.tensor(lengths)
        cu_q = torch.tensor([0, *accumulate(queries)])
        decodes = next((i for i, n in enumerate(queries) if n > 1), len(queries))
        tables, rows, lens, cu_q = (each.int().cuda() for each in (tables, rows, lens, cu_q))
        step = AttentionStep(tables, rows, lens, cu_q, decodes)
        shape = AttentionShape((PLAIN + ROTATED) ** -0.5)
        for splits in (1, 8):
            q = _random(sum(queries), heads, LATENT + ROTATED, dtype=dtype)
            want = paged_attention_reference(q, data, step, shape, rotated=ROTATED)
            out = q[..., :LATENT]
            paged_attention(q, data, step, shape, rotated=ROTATED, out=out, splits=splits)
            yield f"{dtype} {heads} heads, splits {splits}", (out, want)


def _placing(heads: int, dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    slots = torch.randperm(64 * 16)[:200].int().cuda()
    slots[7] = -1
    step = RotaryStep(torch.randint(0, 999, (200,)).int().cuda(), slots)
    table = _random(999, ROTATED, dtype=torch.float32)
    norm = RmsNorm(_random(LATENT, dtype=dtype), 1e-6)
    q = _random(200, heads, PLAIN + ROTATED, dtype=dtype)
    keys = _random(200, LATENT + ROTATED, dtype=dtype)
    found = []
    for function in (place_latent, place_latent_reference):
        out = torch.ones(200, heads, LATENT + ROTATED, dtype=dtype, device="cuda")
        cache = torch.ones(64, 1, 16, LATENT + ROTATED, dtype=dtype, device="cuda")
        function(out, q, keys, step, table, norm, kv=cache)
        found.append((out, cache))
    for name, pair in zip(("queries", "keys"), zip(*found, strict=True), strict=True):
        yield f"{dtype} {heads} heads, {name}", (pair[0], pair[1])


def _by_head(heads: int, dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    slots, rank, width = 3, 16, heads * (PLAIN + VALUE)
    places = torch.arange(slots * 2 * rank).view(slots, 1, 2, rank) * (width // UNIT)
    arena = _random(slots * 2 * rank * width, dtype=dtype) * 0.1
    ranks = torch.tensor([[16], [3], [0]]).int().cuda()
    spans = torch.tensor([[0, width]]).int().cuda()
    site = LoraSite(places.int().cuda(), ranks, spans, LATENT, width)
    of_values = Rows(1, PLAIN, PLAIN + VALUE)
    for tokens in (1, 37, 700):
        which = torch.randint(0, slots, (tokens,)).sort().values
        size = chunk_rows_for(tokens)
        order, chunks = map(torch.from_numpy, sort_into_chunks(which.numpy(), size))
        step = LoraStep(order.cuda(), chunks.cuda(), size, rank)
        for inputs, outputs, inner, outer in (
            (PLAIN, LATENT, Rows(1, by_head=PLAIN + VALUE), Rows(0)),
            (LATENT, VALUE, Rows(0), of_values),
        ):
            x, got = (_random(tokens, heads, n, dtype=dtype) for n in (inputs, outputs))
            want = got.clone()
            by_head(got, x, arena, site, step, inner=inner, outer=outer)
            by_head_reference(want, x, arena, site, step, inner=inner, outer=outer)
            yield f"{dtype} {heads} heads, {tokens} tokens, {inputs} inputs", (got, want)
