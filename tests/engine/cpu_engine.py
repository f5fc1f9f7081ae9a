"""An engine over a checkpoint on a CPU."""

from pathlib import Path

from engine.config import EngineConfig
from engine.loop import Engine
from engine.runners.cpu.runner import load_runner


def engine_of(checkpoint: Path, **changes: object) -> Engine:
    fields = {"model": str(checkpoint), "num_blocks": 96, "threads": 1, "block_size": 16} | changes
    config = EngineConfig(**fields)  # type: ignore[arg-type]
    return Engine(config, load_runner(config))
