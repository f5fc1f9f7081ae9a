"""Families beside Llama's whole through the GPU's runner: the logits of `transformers`, for prompts in
chunks, mixed steps, and decoding over split keys."""

from pathlib import Path

import pytest
import torch

from engine.backends.layers.device.mixture import DeviceMixture
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_logits,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import greedy
from tests.engine.models.test_family_parity import CASES
from tests.engine.models.test_gpt_oss import pair as mxfp4_pair
from tests.engine.quantization.agreement import some_ids

pytest.importorskip("triton")
from tests.engine.gpu.formats.device_driver import assert_answers, device_driver, likely, stand_in

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")

pair = mxfp4_pair  # of gpt-oss, in floats and in MXFP4
PROMPTS = [some_ids(33), some_ids(5)]


@pytest.mark.parametrize(
    ("case", "chunk"),
    [
        ("gpt-oss", 11),
        ("mpt-clipped", 11),
        ("falcon-new-one-norm", 0),
        ("falcon-alibi", 11),
        ("command-r7b", 11),
        *(
            pytest.param(*each, marks=pytest.mark.proof)
            for each in (
                ("gpt-oss-yarn", 0),
                ("bloom", 11),
                ("mpt", 0),
                ("falcon", 11),
                ("falcon-new", 0),
                ("command-r", 11),
                ("command-r-norms", 0),
                ("phi4-mini", 11),
            )
        ),
    ],
)
def test_logits(case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, shape = CASES[case]
    layers = 2 if case in ("gpt-oss", "command-r7b") else 1  # with a window, and without one
    checkpoint = save_checkpoint(tmp_path, family, **(shape | {"num_hidden_layers": layers}))
    with stand_in(monkeypatch):
        assert_answers(device_driver(checkpoint), reference(checkpoint), PROMPTS, 3, chunk=chunk)


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("bloom", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        ("command-r", ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]),
    ],
)
def test_adapters(
    case: str, targets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a row without one: of a matrix of all heads, of an MLP without a gate, of one beside
    attention."""
    family, shape = CASES[case]
    checkpoint = save_checkpoint(tmp_path / "base", family, **(shape | {"num_hidden_layers": 1}))
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 5, 3, targets)
    models = [reference(checkpoint), adapted_reference(checkpoint, adapter)]
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint)
        handle = driver.adapter(adapter, 1)
        asked = greedy(logprobs=VOCAB)
        sequences = [driver.sequence(PROMPTS[1], asked, each) for each in (None, handle)]
        driver.run(sequences, count=3)
    found = [likely(sequence) for sequence in sequences]
    for model, sequence, ours in zip(models, sequences, found, strict=True):
        logits = reference_logits(model, sequence.history[:-1])[len(PROMPTS[1]) - 1 :]
        torch.testing.assert_close(ours, logits.log_softmax(-1), atol=2e-4, rtol=0)
    assert (found[0][0] - found[1][0]).abs().max() > 0.1


@pytest.mark.proof
def test_experts_in_mxfp4(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    dense, packed = pair
    with stand_in(monkeypatch):
        driver = device_driver(packed)
        mixtures = [block.mixture for block in driver.runner._model.decoder.blocks]
        assert all(isinstance(each, DeviceMixture) for each in mixtures)
        assert all(each.gate_up.kind == each.down.kind == "e2m1" for each in mixtures)
        assert_answers(driver, reference(dense), PROMPTS[1:])
