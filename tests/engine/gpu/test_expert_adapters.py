"""Adapters of experts through the GPU's runner: the logits of `transformers` with the change in its
weights, for rows of several adapters in one step, and tables that grow and are cleared."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.adapters.test_inner_adapters import EXPERTS, adapter_of, with_change
from tests.engine.checkpoints import VOCAB, reference, reference_logits
from tests.engine.driver import greedy
from tests.engine.models.test_experts import save_checkpoint, some_ids

pytest.importorskip("triton")
from tests.engine.gpu.formats.device_driver import device_driver, likely, stand_in

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")

PROMPT = some_ids(13)


def adapters_of(checkpoint: Path, folder: Path, case: str) -> list[tuple[Path, Any]]:
    """One of some matrices of some experts, and one of all of them and of the shared expert; each with
    `transformers`' model that has its change."""
    module, names, shared = EXPERTS[case]
    layers = reference(checkpoint).model.layers
    mlp, root = layers[-1].mlp, f"model.layers.{len(layers) - 1}.{module}"
    count, hidden, size = mlp.experts.down_proj.shape
    shapes = dict(zip(names, ((size, hidden), (size, hidden), (hidden, size)), strict=True))
    some = {f"{root}.experts.{n}.{names[n % 3]}": shapes[names[n % 3]] for n in range(count)}
    every = {f"{root}.experts.{n}.{each}": shapes[each] for n in range(count) for each in names}
    if shared:
        out, width = mlp.get_submodule(shared).gate_proj.weight.shape
        every[f"{root}.{shared}.up_proj"] = out, width
        every[f"{root}.{shared}.down_proj"] = width, out
    found = []
    for n, modules in enumerate((some, every)):
        path, added = adapter_of(folder / str(n), modules, n)
        found.append((path, with_change(checkpoint, added)))
    return found


@pytest.mark.parametrize("case", [pytest.param("mixtral", marks=pytest.mark.proof), "qwen2-moe"])
def test_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", case, num_hidden_layers=1)
    adapters = adapters_of(checkpoint, tmp_path, case)
    models = [reference(checkpoint), *(model for _, model in adapters)]
    asked = greedy(logprobs=VOCAB)
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint, blocks=400)
        handles = [None, *(driver.adapter(path, 1 - n) for n, (path, _) in enumerate(adapters))]
        sequences = [driver.sequence(PROMPT, asked, handle) for handle in handles]
        driver.run(sequences, chunk=7, count=2)
        found = [likely(sequence) for sequence in sequences]
        assert handles[1] is not None
        driver.runner.unload_adapter(handles[1])
        again = driver.sequence(PROMPT, asked, handles[2])
        driver.run([again], count=2)
    for model, sequence, ours in zip(models, sequences, found, strict=True):
        logits = reference_logits(model, sequence.history[:-1])[len(PROMPT) - 1 :]
        torch.testing.assert_close(ours, logits.log_softmax(-1), atol=5e-4, rtol=0)
    torch.testing.assert_close(likely(again), found[2], atol=1e-5, rtol=0)
    assert min((found[n][0] - found[n - 1][0]).abs().max() for n in range(3)) > 0.01
