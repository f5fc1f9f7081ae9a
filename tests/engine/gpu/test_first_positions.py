"""First and last positions alone (`kv_window`) by the GPU's runner and the whole engine: answers by
`transformers` with the mask written out, while the blocks between are given to other requests."""

from pathlib import Path

import pytest

from tests.engine.cache.test_kv_window import (
    BLOCK,
    SINKS,
    WINDOW,
    make_engine,
    masked_greedy,
    random_ids,
    run,
)
from tests.engine.checkpoints import reference, save_checkpoint
from tests.engine.helpers import ask

pytest.importorskip("triton")
from tests.engine.gpu.formats.device_driver import stand_in


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_answers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more positions than the pool has, whose blocks go round between two requests."""
    shape = {"num_hidden_layers": 1}
    if family == "Gemma3":  # beside a layer with a window of its own, which needs no other blocks
        shape = {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 10}
        shape |= {"sliding_window_pattern": 2}
    checkpoint = save_checkpoint(tmp_path, family, **shape)
    prompts = [random_ids(count, count) for count in (61, 9)]
    model = reference(checkpoint)
    expected = [masked_greedy(model, prompt, 6) for prompt in prompts]
    with stand_in(monkeypatch):
        engine = make_engine(
            checkpoint, device="cuda", num_blocks=20, max_batch_tokens=32, speculation="off",
            enable_lora=False,
        )  # fmt: skip
        for number, prompt in enumerate(prompts):
            engine.submit(ask(f"r{number}", prompt, 6), "g")
        found, most = run(engine)
    assert [found.tokens[f"r{number}", 0] for number in range(2)] == expected
    assert most <= -(-SINKS // BLOCK) + -(-(WINDOW + 2 * 32) // BLOCK) + 2
    assert found.receipts["r0"].dropped == 61 + 6 - 1 - WINDOW - SINKS
