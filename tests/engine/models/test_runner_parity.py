"""The first truth: the same tokens as `transformers`, and as `peft` where there is an adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.layers import attention_plan, step
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_greedy,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import Driver

PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 16, 33, 70)
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("chunk", [0, 7, 16])
def test_greedy_batches_give_the_tokens_of_transformers(llama: Path, chunk: int) -> None:
    driver = Driver(llama)
    sequences = [driver.sequence(prompt) for prompt in PROMPTS]
    driver.run(sequences, chunk)
    model = reference(llama)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.output == reference_greedy(model, prompt, 16)


def test_batches_too_large_for_the_cache_are_cut(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "_GATHER_BYTES", 0)
    monkeypatch.setattr(attention_plan, "_MIN_SEQUENCES", 2)
    driver = Driver(llama)
    asked = [PROMPTS[n] for n in (3, 0, 1, 2, 0, 3, 1)]
    sequences = [driver.sequence(prompt) for prompt in asked]
    driver.run(sequences)
    model = reference(llama)
    expected = {tuple(prompt): reference_greedy(model, prompt, 16) for prompt in PROMPTS}
    for sequence, prompt in zip(sequences, asked, strict=True):
        assert sequence.output == expected[tuple(prompt)]


@pytest.mark.parametrize(("tied", "shard"), [(True, None), (False, "60KB"), (True, "60KB")])
def test_tied_and_sharded_checkpoints_load(tmp_path: Path, tied: bool, shard: str | None) -> None:
    checkpoint = save_checkpoint(tmp_path, shard=shard, tie_word_embeddings=tied)
    assert (checkpoint / "model.safetensors.index.json").exists() == bool(shard)
    driver = Driver(checkpoint)
    sequence = driver.sequence(PROMPTS[1])
    driver.run([sequence])
    assert sequence.output == reference_greedy(reference(checkpoint), PROMPTS[1], 16)


def test_adapters_of_other_ranks_share_a_batch_with_the_base(llama: Path, tmp_path: Path) -> None:
    driver = Driver(llama)
    paths = [save_adapter(llama, tmp_path / f"r{rank}", rank, rank) for rank in (2, 5, 8)]
    handles = [driver.adapter(path, slot) for slot, path in enumerate(paths)]
    asked = [None, handles[2], handles[0], None, handles[1], handles[2], handles[0]]
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(len(asked))]
    sequences = [
        driver.sequence(prompt, adapter=handle)
        for prompt, handle in zip(prompts, asked, strict=True)
    ]
    driver.run(sequences, chunk=9)
    models = {None: reference(llama)} | {
        handle: adapted_reference(llama, path) for handle, path in zip(handles, paths, strict=True)
    }
    for sequence, prompt, handle in zip(sequences, prompts, asked, strict=True):
        assert sequence.output == reference_greedy(models[handle], prompt, 16)
    pairs = {(n % len(PROMPTS), handle) for n, handle in enumerate(asked)}
    assert len({tuple(s.output) for s in sequences}) == len(pairs)


@pytest.mark.parametrize("split", [0, 1 << 30])
def test_short_rows_answer_alike_beside_others_and_apart(
    llama: Path, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of three tokens, as those that verify guesses: in products with others, or of their own."""
    monkeypatch.setattr(attention_plan, "_SPLIT_BYTES", split)
    plan, queries = attention_plan.plan_tiles, []

    def noted(*given: Any) -> list[attention_plan.Tile]:
        tiles = plan(*given)
        queries.extend(tile.queries for tile in tiles)
        return tiles

    monkeypatch.setattr(step, "plan_tiles", noted)
    driver = Driver(llama)
    sequences = [driver.sequence(prompt) for prompt in PROMPTS]
    driver.run(sequences, chunk=3)
    assert (3 in queries) == (split == 0)
    model = reference(llama)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.output == reference_greedy(model, prompt, 16)
