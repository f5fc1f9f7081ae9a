"""The threads that compute all layers together: whatever their number is, a row has the same bits."""

from pathlib import Path

import pytest

from engine.backends.compiled.linear import PAIRED, instructions
from tests.engine.checkpoints import save_checkpoint
from tests.engine.cpu.test_layers import Steps

# Every product is large enough to be divided, and its tiles are no multiple of the threads.
WIDE = {
    "hidden_size": 320,
    "intermediate_size": 352,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "int4")],
)
def test_threads_do_not_change_bits(
    dtype: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path, "Llama", **WIDE)
    steps = Steps(monkeypatch, dtype)
    for rows in (1, 3):
        steps.run(checkpoint, [None] * rows, threads=1, one_by_one=True, quantization=quantization)
        expected = steps.logits
        for threads in (2, 3):
            steps.run(checkpoint, [None] * rows, threads=threads, quantization=quantization)
            assert steps.at_once == (8 if dtype == "float32" or instructions() in PAIRED else 0)
            assert all(
                left.equal(right) for left, right in zip(steps.logits, expected, strict=True)
            )
