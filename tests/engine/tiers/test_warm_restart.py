"""A real model's blocks from the disk: after a restart, and after `kill -9`."""

import time
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import Receipt
from engine.runners.cpu.runner import load_runner
from engine.worker.client import EngineClient
from tests.engine.checkpoints import VOCAB, reference, reference_greedy, save_checkpoint
from tests.engine.helpers import Collected, ask
from tests.engine.worker.test_server import gather, start_process, wait_until

PROMPT = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture
def tier(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "key").write_text("7c" * 32)
    return {"tier_disk": str(tmp_path / "tier"), "tier_key_file": str(tmp_path / "key")}


def answer(checkpoint: Path, tier: dict[str, str], **changes: object) -> tuple[list[int], Receipt]:
    fields = {
        "model": str(checkpoint), "num_blocks": 40, "block_size": 4, "threads": 1, "device": "cpu",
        "dtype": "float32", "tier_wait_s": 20.0,
    }  # fmt: skip
    config = EngineConfig(**(fields | tier | changes))  # type: ignore[arg-type]
    engine = Engine(config, load_runner(config))
    engine.submit(ask("r", PROMPT, 16), "g")
    found, until = Collected(), time.monotonic() + 40
    while engine.busy and time.monotonic() < until:
        time.sleep(0 if engine.step() else 0.001)
        found.take(engine)
    engine.check_integrity()
    engine.close()
    return found.tokens["r", 0], found.receipts["r"]


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_restored_blocks_give_the_same_tokens(
    tmp_path: Path, tier: dict[str, str], kind: str
) -> None:
    checkpoint = save_checkpoint(tmp_path / "model")
    first, cold = answer(checkpoint, tier, kv_dtype=kind)
    again, warm = answer(checkpoint, tier, kv_dtype=kind)
    assert (cold.cached, warm.cached) == (0, 56) and again == first
    if kind == "auto":
        assert again == reference_greedy(reference(checkpoint), PROMPT, 16)
    other, missed = answer(checkpoint, tier, kv_dtype="fp8")  # another type: never found
    assert missed.cached == 0 and len(other) == 16


async def test_an_engine_that_was_killed_is_warm(tmp_path: Path, tier: dict[str, str]) -> None:
    options = ["--tier-disk", tier["tier_disk"], "--tier-key-file", tier["tier_key_file"]]
    options += ["--tier-wait-s", "20", "--heartbeat-s", "0.05"]
    cached, said = [], []
    for name in ("first", "second"):
        process, address = start_process("--listen", "tcp://127.0.0.1:0", *options)
        client = EngineClient(address, heartbeat_s=0.1)
        try:
            await client.connect(20)
            tokens, receipt = await gather(client, ask(name, list(range(7, 107)), 8))
            cached.append(receipt.cached)
            said.append(tokens)
            stored = Path(tier["tier_disk"])
            await wait_until(lambda folder=stored: len(list(folder.glob("*/*/*"))) >= 6)
        finally:
            await client.close()
            process.kill()
            process.wait(10)
            process.stdout.close()
    assert cached == [0, 96] and said[0] == said[1]
