"""Layers with a window keep keys and values for it alone on a GPU, too: their parts of blocks are pages
of the pool, which a table for each page of a part leads to. Answers by the GPU's runner are those of
`transformers`, and of the same runner with whole blocks."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cache.parts import Windowed
from engine.cache.windowed import PagedPool
from engine.config import EngineConfig
from engine.errors import IntegrityError
from engine.loop import Engine
from engine.model_spec import Sight
from engine.protocol import SamplingParams
from engine.runners.cpu.runner import load_runner
from tests.engine.cache.test_kv_window import random_ids
from tests.engine.cache.test_windowed_blocks import engine_keys
from tests.engine.checkpoints import (
    adapted_reference,
    reference,
    reference_greedy,
    save_adapter,
    save_checkpoint,
)
from tests.engine.helpers import Collected, ask
from tests.engine.speculation.test_speculation import guess_from

pytest.importorskip("triton")
from engine.backends.gpu.part_tables import PartTables
from engine.backends.gpu.sequence_rows import SequenceRows
from engine.runners import model_runner
from engine.runners.gpu import runner as gpu_runner
from tests.engine.gpu.formats.device_driver import stand_in
from tests.engine.gpu.frozen_graph import FrozenGraph
from tests.engine.gpu.test_runner_strict import row

BLOCK, WINDOW = 4, 7
# A full layer between two with a window: a block is a page, its part two.
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": False,  # otherwise answers repeat the last token
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("gemma"), "Gemma3", **SHAPE)


@pytest.fixture(scope="module")
def adapter(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(gemma, tmp_path_factory.mktemp("adapter"), 4, 1)


@pytest.fixture(scope="module")
def adapted(gemma: Path, adapter: Path) -> Any:
    """By `transformers`, which does not load it while there seems to be a device."""
    return adapted_reference(gemma, adapter)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with stand_in(monkeypatch):
        monkeypatch.setattr(gpu_runner, "CudaGraph", FrozenGraph)
        yield


def make_engine(checkpoint: Path, *, graphs: bool = False, **changes: Any) -> Engine:
    """Without `graphs` nothing is padded, which takes the interpreter long."""
    fields: dict[str, Any] = {
        "model": str(checkpoint), "device": "cuda", "dtype": "float32", "block_size": BLOCK,
        "num_blocks": 40, "max_running": 3, "max_batch_tokens": 16, "enable_lora": False,
        "speculation": "off", "step_s": 0.0,
    }  # fmt: skip
    config = EngineConfig(**(fields | changes))
    runner = load_runner(config)
    if not graphs:
        runner._graphs.key_of = lambda step: None  # type: ignore[attr-defined]
    return Engine(config, runner)


def run(engine: Engine, found: Collected | None = None) -> tuple[Collected, int]:
    """What was answered, and the most pages in use."""
    found, most = found or Collected(), 0
    while engine.busy:
        engine.step()
        found.take(engine)
        engine.check_integrity()
        assert isinstance(engine.pool, PagedPool)
        idle = len(engine.pool._idle) + engine.pool.windowed.part * len(engine.pool._idle_parts)
        most = max(most, engine.pool.windowed.numbers - engine.pool._units - idle)
    return found, most


def test_a_long_sequence_holds_what_its_layers_see(gemma: Path) -> None:
    """More positions than whole blocks would have room for, and fewer pages in use."""
    engine, prompt = make_engine(gemma, num_blocks=12), random_ids(52, 1)
    assert len(prompt) > 12 * BLOCK
    engine.submit(ask("r", prompt, 5), "g")
    found, most = run(engine)
    assert found.tokens["r", 0] == reference_greedy(reference(gemma), prompt, 5)
    blocks = -(-(52 + 5) // BLOCK)
    # Beside the window, the parts that a step of 16 tokens writes.
    assert most <= blocks + 2 * (-(-(WINDOW + 16) // BLOCK) + 1) < 2 * blocks
    assert engine.pool.free_blocks == 12


def test_prefixes_choices_and_preemption(gemma: Path) -> None:
    """In an overlapped loop and recorded graphs, with memory for a part of the requests."""
    engine = make_engine(gemma, graphs=True, num_blocks=14, overlap=True)
    model, common = reference(gemma), random_ids(13, 2)
    asked = {f"r{n}": [*common, *random_ids(n, n)] for n in (1, 14)} | {"late": random_ids(6, 5)}
    answers = {name: reference_greedy(model, prompt, 6) for name, prompt in asked.items()}
    found = Collected()
    for name, prompt in asked.items():
        choices, priority = 1 + (name == "r1"), int(name == "late")
        engine.submit(ask(name, prompt, 6, n=choices, priority=priority), "g")
        engine.step()
        found.take(engine)
    preempted = False
    while engine.busy:
        engine.step()
        found.take(engine)
        engine.check_integrity()
        ahead = [seq for seq in engine.scheduler.running if seq.output_len >= 3]
        if ahead and not preempted:
            engine._drain_launched()
            engine.scheduler._preempt(ahead[0])
            preempted = True
    assert preempted
    for (name, _), tokens in found.tokens.items():
        assert tokens == answers[name], name
    assert len(found.tokens) == 4
    used = engine._runner._graphs._graphs  # type: ignore[attr-defined]
    assert {key.sequences > 0 for key in used} == {False, True}, "decoding, and beside prompts"


def test_what_was_evicted_comes_from_a_tier_with_its_parts(gemma: Path) -> None:
    model, first, other = reference(gemma), random_ids(22, 3), random_ids(27, 4)
    engine, cached = make_engine(gemma, num_blocks=7, tier_ram_bytes=1 << 20, tier_wait_s=20.0), []
    for number, prompt in enumerate((first, other, first)):
        engine.submit(ask(f"r{number}", prompt, 2), "g")
        found = Collected()
        while engine.busy or engine.tiers.busy:
            engine.step()
            found.take(engine)
        engine.check_integrity()
        assert found.tokens[f"r{number}", 0] == reference_greedy(model, prompt, 2)
        cached.append(found.receipts[f"r{number}"].cached)
        if prompt is other:
            kept = engine.pool.hits(engine_keys(engine, first), 5)
            assert engine.pool.with_window(engine_keys(engine, first), kept) < 5
    assert cached == [0, 0, 20]
    engine.close()


def test_adapters_and_guesses(gemma: Path, adapter: Path, adapted: Any) -> None:
    """Adapters lie in all pages of the blocks that they are given."""
    prompt = random_ids(23, 6)
    plain, changed = (reference_greedy(model, prompt, 9) for model in (reference(gemma), adapted))
    fields = {"enable_lora": True, "max_adapter_slots": 1, "max_lora_rank": 16}
    engine = make_engine(gemma, num_blocks=120, **fields)
    digest = engine.load_adapter(str(adapter)).digest
    answers = {None: plain, digest: changed}
    guess_from(engine, lambda seq: answers[seq.request.inputs.adapter], random.Random(1), 0.3)
    for each in answers:
        engine.submit(ask(f"{each}", prompt, 9, adapter=each), "g")
    found, _ = run(engine)
    assert {each: found.tokens[f"{each}", 0] for each in answers} == answers
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0
    runner = engine._runner
    pages = runner.adapters._copies[digest].image.shape[0]  # type: ignore[attr-defined]
    assert runner.adapter_blocks(digest) == -(-pages // 3) < pages


def test_codes_and_first_positions_are_the_same_with_parts_or_without(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys in 8 bits, where the full layer sees the first and the last positions alone."""
    prompts, answers = [random_ids(n, n) for n in (26, 5)], []
    for _ in range(2):
        engine = make_engine(gemma, kv_dtype="int8", kv_window=12, kv_sinks=2)
        for number, prompt in enumerate(prompts):
            engine.submit(ask(f"r{number}", prompt, 4), "g")
        answers.append(Collected())
        while engine.busy:
            engine.step()
            answers[-1].take(engine)
        monkeypatch.setattr(model_runner, "windowed_layers", lambda *_: None)
    assert answers[0].tokens == answers[1].tokens
    assert not isinstance(engine.pool, PagedPool)


def test_tables_have_the_pages_of_what_a_row_sees() -> None:
    windowed = Windowed(Sight(8), frozenset({0, 2}), 1, 20, 1)
    parts = PartTables(windowed, 13, 10, 4)
    rows = SequenceRows(3, None, parts)
    assert (parts.count, parts.width) == (2, 16 + 2 * 12)
    params = SamplingParams(max_tokens=9)
    blocks = [11, 3, 7, 5, 2]
    first = row(4, [1] * 9, 0, params, blocks=blocks)
    pages = {n: [20 + 2 * block, 21 + 2 * block] for n, block in enumerate(blocks)}

    def cells(row_: int, numbers: range) -> list[tuple[int, int, int]]:
        return [(row_, 16 + 12 * t + n, pages[n][t]) for t in (0, 1) for n in numbers]

    (at,), changes = rows.assign([first])
    assert changes == [(at, n, block) for n, block in enumerate(blocks)] + cells(at, range(3))
    # One more block; then all that the window sees, when the table has changed.
    assert rows.assign([row(4, [1] * 4, 9, params, blocks=blocks)])[1] == cells(at, range(3, 4))
    assert rows.assign([row(4, [1], 13, params, blocks=blocks)])[1] == []
    again = row(4, [1], 19, params, blocks=blocks, table_version=1)
    assert rows.assign([again])[1][len(blocks) :] == cells(at, range(3, 5))
    slots = np.array([11 * 4 + 3, -1, 2 * 4], np.int32)
    assert [each.tolist() for each in parts.slots(slots)] == [[171, -1, 96], [175, -1, 100]]
    windowed.pages[7] = -1
    with pytest.raises(IntegrityError, match="without its part"):
        rows.assign([row(5, [1], 8, params, blocks=blocks)])
    tables = torch.zeros(3, parts.width)
    assert [view.storage_offset() for view in parts.views(tables)] == [16, 28]
