"""An adapter whose finite weights overflow harms its own requests only, and they are not charged."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from engine.batch import Row, Sampled
from engine.config import EngineConfig
from engine.decoding.sampling import Sampler, host_samples
from engine.loop import Engine
from engine.protocol import FinishReason, SamplingParams
from engine.runners.cpu.runner import load_runner
from tests.engine.checkpoints import reference, reference_greedy, save_adapter, save_checkpoint
from tests.engine.helpers import ask, make_engine, run_until_idle


@pytest.fixture(scope="module", params=[None, 7], ids=["full", "window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    if request.param is None:
        return save_checkpoint(directory)
    return save_checkpoint(directory, "Mistral", sliding_window=request.param)


def hostile_adapter(checkpoint: Path, directory: Path) -> Path:
    """Weights that are finite, and whose products are not."""
    save_adapter(checkpoint, directory, 4, 1)
    path = directory / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({k: v * 1e25 for k, v in weights.items()}, path)
    return directory


def engine_of(checkpoint: Path, blocks: int) -> Engine:
    config = EngineConfig(
        model=str(checkpoint), dtype="float32", threads=1, num_blocks=blocks, prefix_cache=False,
        max_batch_tokens=64, max_running=4, max_adapter_slots=1,
    )  # fmt: skip
    return Engine(config, load_runner(config))


def prompt(length: int, salt: int) -> list[int]:
    return [3 + (salt * 37 + 11 * i) % 200 for i in range(length)]


def test_a_neighbour_of_a_hostile_adapter_answers_as_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    state_path = str(hostile_adapter(checkpoint, tmp_path / "hostile"))
    model = reference(checkpoint)
    engine = engine_of(checkpoint, 24)
    digest = engine.load_adapter(state_path).digest
    prompts = [prompt(length, salt) for salt, length in enumerate((5, 18, 33))]
    engine.submit(ask("hostile", prompt(40, 9), adapter=digest, namespace="mallory"), "g")
    for number, ids in enumerate(prompts):
        engine.submit(ask(f"r{number}", ids, max_tokens=12), "g")
    found = run_until_idle(engine)
    for number, ids in enumerate(prompts):
        assert found.tokens[f"r{number}", 0] == reference_greedy(model, ids, 12)
    assert found.receipts["hostile"].finish_reason is FinishReason.ERROR


def test_blocks_that_held_numbers_that_are_not_finite_serve_the_next_tenant(
    checkpoint: Path, tmp_path: Path
) -> None:
    state_path = str(hostile_adapter(checkpoint, tmp_path / "hostile"))
    model = reference(checkpoint)
    engine = engine_of(checkpoint, 24)
    digest = engine.load_adapter(state_path).digest
    pool = engine._runner.pool.data  # type: ignore[attr-defined]
    for salt, lengths in enumerate(((5,), (18, 3), (33, 9, 2), (20, 7))):
        # Every free block holds what the hostile adapter left.
        engine.submit(ask(f"x{salt}", prompt(200, 9), adapter=digest, namespace="mallory"), "g")
        run_until_idle(engine)
        assert not torch.isfinite(pool).all()
        prompts = [prompt(length, salt) for length in lengths]
        for number, ids in enumerate(prompts):
            engine.submit(ask(f"r{salt}.{number}", ids, max_tokens=20), "g")
        found = run_until_idle(engine)
        for number, ids in enumerate(prompts):
            assert found.tokens[f"r{salt}.{number}", 0] == reference_greedy(model, ids, 20)


def test_a_request_without_a_finite_logit_is_not_charged(checkpoint: Path, tmp_path: Path) -> None:
    state_path = str(hostile_adapter(checkpoint, tmp_path / "hostile"))
    engine = engine_of(checkpoint, 24)
    digest = engine.load_adapter(state_path).digest
    engine.submit(ask("x", prompt(40, 9), adapter=digest, temperature=1.0, logprobs=2), "g")
    found = run_until_idle(engine)
    receipt = found.receipts["x"]
    assert (receipt.prompt, receipt.cached, receipt.computed) == (0, 0, 0)
    assert (receipt.unprocessed, receipt.generated, receipt.delivered) == (40, 0, 0)
    assert receipt.finish_reason is FinishReason.ERROR
    assert "not finite" in receipt.message and "adapter" in receipt.message
    assert found.tokens["x", 0] == []


@pytest.mark.parametrize("overlapped", [False, True])
def test_tokens_delivered_before_a_fault_stay_charged(
    overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(overlapped=overlapped)
    engine.submit(ask("x", [5] * 10, max_tokens=20), "g")
    engine.submit(ask("y", [6] * 10, max_tokens=20), "g")
    collect = engine._runner.collect
    steps = 0

    def faulty(ticket: list) -> list:
        nonlocal steps
        steps += 1
        sampled = collect(ticket)
        return [
            Sampled(s.seq, [], error="no numbers") if steps == 4 and s.seq == 1 else s
            for s in sampled
        ]

    monkeypatch.setattr(engine._runner, "collect", faulty)
    found = run_until_idle(engine)
    assert found.receipts["x"].finish_reason is FinishReason.ERROR
    assert found.receipts["x"].delivered == found.receipts["x"].generated == 3
    assert found.receipts["x"].prompt == found.receipts["x"].computed == 10
    assert len(found.tokens["y", 0]) == 20


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [40, 256])
def test_only_the_row_that_is_not_finite_has_no_token(
    value: float, temperature: float, vocab: int
) -> None:
    params = SamplingParams(max_tokens=5, temperature=temperature, top_p=0.9, seed=3)
    rows = [Row(n, [7], 4, [0], None, True, params, 0, [5] * 5, 5) for n in range(3)]
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1))
    logits[1, 17] = value
    tokens = [
        s.tokens
        for s in host_samples(rows, Sampler(vocab, (2,), torch.device("cpu"))(rows, logits))
    ]
    assert tokens[1] == []
    assert all(0 <= token < vocab for n in (0, 2) for token in tokens[n])
