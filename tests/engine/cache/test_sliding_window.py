"""Blocks that every layer's window has passed are given back: a long answer fits a small pool."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.loop import Engine
from engine.runners.cpu.runner import load_runner
from tests.engine.checkpoints import VOCAB, reference, reference_greedy, save_checkpoint
from tests.engine.helpers import Collected, ask

WINDOW, BLOCK = 20, 4


def make_engine(checkpoint: Path, overlap: bool, **changes: object) -> Engine:
    fields = {
        "model": str(checkpoint), "num_blocks": 26, "block_size": BLOCK, "dtype": "float32",
        "threads": 1, "max_batch_tokens": 16, "max_running": 4, "overlap": overlap, "device": "cpu",
    }  # fmt: skip
    config = EngineConfig(**(fields | changes))  # type: ignore[arg-type]
    return Engine(config, load_runner(config))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    return save_checkpoint(folder, "Mistral", sliding_window=WINDOW, num_hidden_layers=2)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_long_answers_fit_where_one_did_not(mistral: Path, overlap: bool) -> None:
    engine = make_engine(mistral, overlap)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (9, 30)]
    for number, prompt in enumerate(prompts):
        engine.submit(ask(f"r{number}", prompt, 60, namespace=f"t{number}"), "g")
    found, most = Collected(), 0
    while engine.busy:
        engine.step()
        found.take(engine)
        engine.check_integrity()
        if not found.receipts:
            longest = max(len(s.held_blocks) for s in engine.scheduler.running)
            most = max(most, longest)
    model = reference(mistral)
    for number, prompt in enumerate(prompts):
        assert found.tokens[f"r{number}", 0] == reference_greedy(model, prompt, 60)
    assert not engine.metrics.counters["preemptions"]
    assert most <= max(-(-30 // BLOCK) + 1, -(-WINDOW // BLOCK) + 2)
    assert engine.pool.free_blocks == engine.pool.num_blocks


def test_prompt_and_answer_may_be_longer_than_the_pool(mistral: Path) -> None:
    engine = make_engine(mistral, False, num_blocks=12)
    prompt = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    for name in ("first", "again"):
        engine.submit(ask(name, prompt, 30), "g")
        found = Collected()
        while engine.busy:
            engine.step()
            found.take(engine)
            engine.check_integrity()
        assert found.tokens[name, 0] == reference_greedy(reference(mistral), prompt, 30)
        assert found.receipts[name].dropped == 0, "by the model's own window, not by a setting"


def test_choices_share_what_the_window_still_sees(mistral: Path) -> None:
    engine = make_engine(mistral, False, num_blocks=64)
    prompt = torch.randint(3, VOCAB, (41,), generator=torch.Generator().manual_seed(2)).tolist()
    engine.submit(ask("r", prompt, 30, n=3), "g")
    found = Collected()
    while engine.busy:
        engine.step()
        found.take(engine)
        engine.check_integrity()
    expected = reference_greedy(reference(mistral), prompt, 30)
    assert [found.tokens["r", choice] for choice in range(3)] == [expected] * 3


def test_one_layer_without_a_window_keeps_every_block(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(
        tmp_path, "Gemma2", sliding_window=WINDOW, num_hidden_layers=2, head_dim=16
    )
    engine = make_engine(checkpoint, False, num_blocks=64, speculation="off")
    engine.submit(ask("r", [5] * 9, 60), "g")
    most = 0
    while engine.busy:
        engine.step()
        most = max([most, *(len(seq.held_blocks) for seq in engine.scheduler.running)])
        engine.take_outboxes()
    assert most == -(-(9 + 60 - 1) // BLOCK)
