"""What adapters change beside sums of low rank, against its references on the real device."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu.models import LLAMA_8B
from engine.backends.gpu.adapters.adapter_pages import FACTORS, AdapterTable, pack_adapter
from engine.backends.gpu.adapters.lora_chunks import chunk_rows_for, sort_into_chunks
from engine.backends.gpu.adapters.lora_reference import LoraStep
from engine.backends.gpu.adapters.rescale_launch import rescale, rescale_reference
from engine.backends.layers.matrices import PARTS, SITES, part_shape
from engine.models.registry import model_spec

SLOTS = 4


def lengths(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """DoRA's, of adapters some of whose rows and parts have none."""
    block, spec = 1 << 18, model_spec(LLAMA_8B | {"num_hidden_layers": 1})
    table = AdapterTable(spec, SLOTS, 16, block, torch.device("cuda"))
    arena = torch.full((16, block), float("nan"), dtype=dtype, device="cuda")
    free = torch.randperm(16)
    for slot in range(SLOTS):
        parts = PARTS[slot:]
        matrices = {
            (0, f"{part}.factor"): (torch.rand(1, out), torch.randn(1, out))
            for part in parts
            for _, out in [part_shape(spec, part)]
        }
        packed = pack_adapter(matrices, 1, block, dtype, names=PARTS + FACTORS)
        mine, free = free[: len(packed.image)], free[len(packed.image) :]
        arena[mine.cuda()] = packed.image.cuda()
        table.fill(slot, packed, mine)
    for tokens, name in product((1, 37, 700), SITES):
        slots = torch.randint(-1, SLOTS, (tokens,)).sort().values
        order, chunks = map(
            torch.from_numpy, sort_into_chunks(slots.numpy(), chunk_rows_for(tokens))
        )
        step = LoraStep(order.cuda(), chunks.cuda(), chunk_rows_for(tokens), 16)
        if len(chunks):
            site = table.rescale(0, name)
            assert site is not None
            got = torch.randn(tokens, int(site.spans[:, 1].sum()), device="cuda").to(dtype)
            want = got.clone()
            rescale(got, arena.view(-1), site, step)
            rescale_reference(want, arena.view(-1), site, step)
            yield f"{dtype} {tokens} tokens {name}", (got, want)
