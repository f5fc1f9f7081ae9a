"""A runner's memory is free as soon as nobody holds the runner, without Python's collector of cycles:
on a GPU the next model's pool would not fit beside it until that runs."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loop import Engine
from engine.models.load import load_model
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import CpuRunner
from tests.engine.checkpoints import save_adapter, save_checkpoint
from tests.engine.gpu.device import DEVICE

runner_gpu = pytest.importorskip("engine.runners.gpu.runner")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("kind", "invariant"), [("cpu", False), ("cpu", True), ("gpu", False)])
def test_a_runner_is_freed_at_once(kind: str, invariant: bool, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1)
    config = EngineConfig(
        model=str(checkpoint), num_blocks=40, dtype="float32", max_running=3, max_batch_tokens=12,
        max_adapter_slots=1, max_lora_rank=16, device=DEVICE if kind == "gpu" else "cpu",
        batch_invariant=invariant,
    )  # fmt: skip
    made = {"cpu": CpuRunner, "gpu": runner_gpu.GpuRunner}[kind]
    runner = made(config, load_model(config))
    engine = Engine(config, runner)
    digest = engine.load_adapter(str(adapter)).digest
    for n in range(2):
        sampling = SamplingParams(max_tokens=3, temperature=0.8 * n, seed=1, ignore_eos=True)
        ask = GenerateRequest(f"r{n}", "t", [3, 4, 5], sampling, digest if n else None)
        engine.submit(ask, "test")
    while engine.busy:
        engine.step()
        engine.take_outboxes()
    pool, ended = weakref.ref(runner.pool.data), weakref.ref(runner)
    del runner, engine
    assert ended() is None
    assert pool() is None
