"""Adapters packed into blocks of the KV cache are found again, wherever their blocks lie."""

import numpy as np
import pytest
import torch

from engine.backends.gpu.adapters.adapter_image import first_units
from engine.backends.gpu.adapters.adapter_pages import AdapterTable, Matrices, pack_adapter
from engine.backends.gpu.adapters.lora_chunks import sort_into_chunks
from engine.backends.gpu.adapters.lora_reference import LoraStep, lora_reference
from engine.backends.layers.matrices import PARTS, SITES, part_shape
from engine.models.registry import model_spec

LAYERS, BLOCK = 2, 1024
SPEC = model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 80,
        "intermediate_size": 130,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 8,
        "max_position_embeddings": 8,
    }
)
WIDTHS = {part: part_shape(SPEC, part)[1] for part in PARTS}
INPUTS = {site: part_shape(SPEC, parts[0])[0] for site, parts in SITES.items()}


def random_adapter(ranks: dict[tuple[int, str], int], seed: int) -> Matrices:
    generator = torch.Generator().manual_seed(seed)
    return {
        (layer, part): (
            torch.randn(rank, part_shape(SPEC, part)[0], generator=generator),
            torch.randn(rank, WIDTHS[part], generator=generator),
        )
        for (layer, part), rank in ranks.items()
    }


def expected(y: torch.Tensor, x: torch.Tensor, adapter: Matrices, layer: int, site: str) -> None:
    column = 0
    for part in SITES[site]:
        if (layer, part) in adapter:
            a, b = adapter[layer, part]
            y[:, column : column + WIDTHS[part]] += x @ a.T @ b
        column += WIDTHS[part]


@pytest.mark.parametrize("size", [BLOCK, BLOCK + 16, BLOCK + 33])
def test_two_adapters_in_scattered_blocks(size: int) -> None:
    """Blocks of codes and scales do not all begin where a unit does."""
    uneven = {(layer, part): 3 + 5 * layer + i for layer in (0, 1) for i, part in enumerate(PARTS)}
    adapters = [random_adapter(uneven, 0), random_adapter({(1, "v"): 20, (0, "down"): 1}, 1)]
    arena = torch.full((99, size), float("nan"))
    units = arena.view(-1)[: arena.numel() // 64 * 64].view(-1, 64)
    table = AdapterTable(SPEC, 4, 32, size, torch.device("cpu"))
    blocks = torch.randperm(99, generator=torch.Generator().manual_seed(2))
    for slot, adapter in ((2, adapters[0]), (0, adapters[1])):
        packed = pack_adapter(adapter, LAYERS, size, torch.float32)
        mine, blocks = blocks[: len(packed.image)], blocks[len(packed.image) :]
        whole = packed.image.view(len(mine), -1, 64)
        for first, each in zip(first_units(mine, size).tolist(), whole, strict=True):
            units[first : first + len(each)] = each
        written = ~arena.isnan().all(1)
        assert written[mine].all() and not written[blocks].any()  # no block of another one
        table.fill(slot, packed, mine)
    order, chunks = map(torch.from_numpy, sort_into_chunks(np.array([2, 0, -1, 2]), 16))
    step = LoraStep(order, chunks, 16, 32)
    for layer in range(LAYERS):
        for name, parts in SITES.items():
            x = torch.randn(4, INPUTS[name], generator=torch.Generator().manual_seed(layer))
            got, want = torch.zeros(2, 4, sum(WIDTHS[part] for part in parts)).unbind()
            lora_reference(got, x, arena.flatten(), table.site(layer, name), step)
            for rows, adapter in (([0, 3], adapters[0]), ([1], adapters[1])):
                part = want[rows]
                expected(part, x[rows], adapter, layer, name)
                want[rows] = part
            torch.testing.assert_close(got, want)


def test_a_cleared_slot_adds_nothing() -> None:
    packed = pack_adapter(random_adapter({(0, "o"): 4}, 0), LAYERS, BLOCK, torch.float32)
    table = AdapterTable(SPEC, 1, 16, BLOCK, torch.device("cpu"))
    table.fill(0, packed, torch.arange(len(packed.image)))
    table.clear(0)
    order, chunks = map(torch.from_numpy, sort_into_chunks(np.array([0]), 16))
    y = torch.zeros(1, 80)
    step = LoraStep(order, chunks, 16, 16)
    lora_reference(y, torch.ones(1, 96), packed.image.flatten(), table.site(0, "o"), step)
    assert not y.any()


def test_a_row_wider_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 130 elements does not fit a block of 128"):
        pack_adapter(random_adapter({(0, "down"): 1}, 0), LAYERS, 128, torch.float32)


def test_no_more_blocks_than_the_rows_need() -> None:
    ranks = {(layer, part): 16 for layer in (0, 1) for part in PARTS}
    adapter = random_adapter(ranks, 0)
    units = sum(16 * (-(-a.shape[1] // 64) - (-b.shape[1] // 64)) for a, b in adapter.values())
    packed = pack_adapter(adapter, LAYERS, BLOCK, torch.float32)
    assert len(packed.image) <= -(-units // (BLOCK // 64 - 2))  # a block's end may hold no row more
