"""Adapters beyond sums of low rank through the GPU's runner: DoRA, the token table, the head and whole
matrices in their place, with PEFT as the reference."""

from pathlib import Path

import pytest
import torch

from tests.engine.adapters.test_adapter_kinds import KINDS, stirred
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_logits,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import Driver, greedy
from tests.engine.gpu.device import DEVICE, close
from tests.engine.models.test_family_parity import CASES

pytest.importorskip("triton")
from engine.backends.gpu.adapters.adapter_ends import change_logits, change_table, pack_ends
from engine.backends.gpu.adapters.adapter_image import AdapterImage, places_in_blocks
from engine.backends.gpu.adapters.rescale_launch import rescale, rescale_reference
from engine.backends.gpu.skinny_launch import SkinnyTiles
from engine.backends.layers.adapter_extras import AdapterExtras, HeadChange, Rescale, TableChange
from engine.backends.layers.linear import DenseLinear
from tests.engine.gpu.formats.device_driver import device_driver, likely, stand_in
from tests.engine.gpu.test_lora import make_site, make_step

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")
PROMPT = [5, 9, 12, 40, 33, 71, 8]
# Of two layers, the second of which reads the keys of the first, for sampled rows alone.
STREAMS = CASES["gemma3n"][1] | {
    "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1,
    "activation_sparsity_pattern": [0.9, 0.0],
}  # fmt: skip
BASES = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Qwen2", {}),
    "scales": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "streams": ("Gemma3n", STREAMS),
}


@pytest.mark.parametrize(
    "base",
    ["tied", *(pytest.param(n, marks=pytest.mark.proof) for n in ("streams", "biases", "scales"))],
)
def test_every_kind_beside_all_others(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of prompt chunks and of decoding steps."""
    family, shape = BASES[base]
    checkpoint = save_checkpoint(tmp_path / "base", family, **({"num_hidden_layers": 1} | shape))
    adapters = [
        stirred(save_adapter(checkpoint, tmp_path / str(n), rank=4, seed=n, **dict(changes)), n)
        for n, changes in enumerate(KINDS.values())
    ]
    models = [reference(checkpoint), *(adapted_reference(checkpoint, each) for each in adapters)]
    slots = len(adapters)
    with stand_in(monkeypatch):
        driver = device_driver(
            checkpoint, blocks=700, max_adapter_slots=slots, max_running=slots + 1
        )
        handles = [None, *(driver.adapter(each, slot) for slot, each in enumerate(adapters))]
        asked = greedy(logprobs=VOCAB)
        sequences = [driver.sequence(PROMPT, asked, each) for each in handles]
        driver.run(sequences, chunk=4, count=2)
    found = [likely(sequence) for sequence in sequences]
    for model, sequence, ours in zip(models, sequences, found, strict=True):
        logits = reference_logits(model, sequence.history[:-1])[len(PROMPT) - 1 :]
        torch.testing.assert_close(ours, logits.log_softmax(-1), atol=3e-4, rtol=0)
    for n, ours in enumerate(found):
        assert all((ours[0] - other[0]).abs().max() > 0.01 for other in found[:n])


def recorded(driver: Driver) -> list[bool]:
    return [key.rescaled for key in driver.runner._graphs._graphs]


def test_steps_with_dora_are_graphs_and_those_with_a_head_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    adapters = [
        save_adapter(checkpoint, tmp_path / kind, rank=4, seed=n, **dict(KINDS[kind]))
        for n, kind in enumerate(("dora", "head"))
    ]
    plain = save_adapter(checkpoint, tmp_path / "plain", 4, 7)
    expected = reference_logits(adapted_reference(checkpoint, plain), PROMPT)[-1:]
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint, blocks=300)
        dora, head = (driver.adapter(each, slot) for slot, each in enumerate(adapters))
        driver.run([driver.sequence(PROMPT, adapter=dora)], count=2)
        assert recorded(driver) == [True, True]  # of a prompt, and of a decoding step
        driver.run([driver.sequence(PROMPT, adapter=head)], count=2)
        assert recorded(driver) == [True, True]
        # Nothing of an adapter stays in its slot.
        driver.runner.unload_adapter(dora)
        driver.runner.unload_adapter(head)
        sequence = driver.sequence(PROMPT, greedy(logprobs=VOCAB), driver.adapter(plain, 0))
        driver.run([sequence], count=1)
    torch.testing.assert_close(likely(sequence), expected.log_softmax(-1), atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["plain", "dora", "head"])
def test_in_models_whose_steps_of_few_rows_are_fused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused products have sums of low rank alone; other steps are as they are for many rows."""
    checkpoint = save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    path = save_adapter(checkpoint, tmp_path / kind, rank=4, seed=2, **dict(KINDS.get(kind, {})))
    models = (adapted_reference(checkpoint, path), reference(checkpoint))
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint, blocks=300)
        tiles = dict.fromkeys(range(1, 17), SkinnyTiles(16, 32, 4, 2))
        driver.runner._forward.fused_tiles = tiles
        handles = [driver.adapter(path, 0), None]
        sequences = [driver.sequence(PROMPT, greedy(logprobs=VOCAB), each) for each in handles]
        driver.run(sequences, count=2)
    for model, sequence in zip(models, sequences, strict=True):
        logits = reference_logits(model, sequence.history[:-1])[len(PROMPT) - 1 :]
        torch.testing.assert_close(likely(sequence), logits.log_softmax(-1), atol=3e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [16, 64])
def test_lengths(dtype: torch.dtype, chunk_rows: int) -> None:
    """Of rows of two adapters, of which one has no factor for the second of three slices."""
    site, arena = make_site([[1, 0, 1], [1, 1, 1], [1, 1, 1]], [300, 64, 40], 0, dtype)
    for rows in site.rows:  # a factor is as long as its slice, where an A has the inputs
        for piece, (_, width) in enumerate(site.spans.tolist()):
            for side in (0, 1):
                place = int(rows[piece, side, 0]) * 64
                if place < arena.numel():
                    arena[place : place + width] = torch.rand(width).to(DEVICE, dtype)
    step = make_step([-1, 0, 2, 0, -1, *[2] * 20], chunk_rows, 16, padding=2)
    y = torch.randn(25, 404).to(DEVICE, dtype)
    expected = y.clone()
    rescale_reference(expected, arena, site, step)
    before = y.clone()
    rescale(y, arena, site, step)
    close(y, expected)
    assert torch.equal(y[0], before[0]) and torch.equal(y[1, 300:364], before[1, 300:364])
    assert not torch.equal(y[2, 300:364], before[2, 300:364])


@pytest.mark.parametrize("kind", ["whole", "pair", "whole and pair"])
@pytest.mark.parametrize("count", [1, 20])
def test_matrices_in_scattered_blocks(kind: str, count: int) -> None:
    """A table and a head whose rows of ids are longer than a block, by the changes' own definition."""
    torch.manual_seed(1)
    vocab, hidden, rank, block = 1300, 80, 5, 1000
    whole = torch.randn(vocab, hidden) if "whole" in kind else None
    pairs = [None, None]
    if "pair" in kind:
        pairs = [
            (torch.randn(vocab, rank), torch.randn(rank, hidden)),
            (torch.randn(hidden, rank), torch.randn(rank, vocab)),
        ]
    table = TableChange(whole, pairs[0], Rescale(torch.rand(hidden)))
    head = HeadChange(whole, pairs[1], Rescale(torch.rand(vocab)))
    image = AdapterImage(block)
    packed = pack_ends(AdapterExtras(table=table, head=head), image)
    filled = image.filled(torch.float32, pinned=False)
    blocks = torch.randperm(len(filled) + 3)[: len(filled)]
    arena = torch.full(((len(filled) + 3) * block,), float("nan"))
    for number, content in zip(blocks.tolist(), filled, strict=True):
        first = -(-number * block // 64) * 64
        arena[first : first + len(content)] = content
    ends = packed.placed(
        lambda offsets: places_in_blocks(offsets, filled, blocks, block).to(DEVICE)
    )
    ids = torch.randint(0, vocab, (count,))
    x, base = torch.randn(count, hidden), DenseLinear(torch.randn(vocab, hidden))
    on_device = arena.to(DEVICE), ids.to(DEVICE), x.to(DEVICE)
    found = change_table(ends.table, on_device[0], on_device[1], on_device[2].clone())
    torch.testing.assert_close(found.cpu(), table(ids, x), atol=1e-4, rtol=1e-4)
    found = change_logits(ends.head, on_device[0], on_device[2], base(x).to(DEVICE))
    torch.testing.assert_close(found.cpu(), head(x, base), atol=1e-3, rtol=1e-4)
