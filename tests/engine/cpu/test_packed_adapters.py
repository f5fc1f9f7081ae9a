"""Adapters in the one call of all layers: PEFT's logits, and the bits of the operations one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.compiled.linear import PAIRED
from engine.models import linears
from engine.runners.cpu.adapters import CpuAdapters
from engine.runners.cpu.packed_adapters import PackedAdapters
from tests.engine.checkpoints import adapted_reference, reference, reference_logits, save_adapter
from tests.engine.cpu.test_layers import Steps, save_checkpoint
from tests.engine.driver import Driver

# Rank and targets; every matrix where there are none.
KINDS: list[tuple[int, Any]] = [
    (1, ["q_proj", "v_proj"]),
    (7, r"model\.layers\.1\.(self_attn\.k_proj|mlp\.gate_proj)"),
    (16, None),
    (16, ["up_proj", "down_proj"]),
    (33, ["o_proj"]),
    (64, None),
]
# Of each sequence: one of the above, or none; out of order, some with several rows and most with one.
CHOSEN = [2, None, 5, 0, 2, 1, None, 4, 3, 2, 5, 2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"), "llama-mha-biased")


def saved(checkpoint: Path, root: Path, kinds: list[tuple[int, Any]]) -> list[Path]:
    """An adapter for each kind, a rank and its targets."""
    return [
        save_adapter(checkpoint, root / str(n), rank, n, targets, lora_alpha=4)
        for n, (rank, targets) in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return saved(checkpoint, tmp_path_factory.mktemp("adapters"), KINDS)


def chosen(adapters: list[Path]) -> list[Path | None]:
    return [None if n is None else adapters[n] for n in CHOSEN]


def test_logits_are_those_of_peft(
    level: str, checkpoint: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, asked = Steps(monkeypatch, "float32"), chosen(adapters)
    sequences = steps.run(checkpoint, asked)
    assert steps.at_once == 8  # all but the prompts'
    models = {
        path: reference(checkpoint) if path is None else adapted_reference(checkpoint, path)
        for path in set(asked)
    }
    order = decoding_order(asked)
    for sequence, path, row in zip(sequences, asked, order, strict=True):
        exact = reference_logits(models[path], sequence.history[:-1])[-1]
        torch.testing.assert_close(steps.logits[-1][row], exact, rtol=2e-4, atol=2e-4)


def decoding_order(asked: list[Path | None]) -> list[int]:
    """The row of each sequence's logits: sorted by filled rank, then by slot."""
    slots = list(dict.fromkeys(path for path in asked if path is not None))
    filled = {1: 2, 7: 8, 16: 16, 33: 64, 64: 64}

    def key(n: int) -> tuple[int, int]:
        path, number = asked[n], CHOSEN[n]
        if path is None or number is None:
            return 0, 0
        return filled[KINDS[number][0]], slots.index(path)

    by_row = sorted(range(len(asked)), key=key)
    return [by_row.index(n) for n in range(len(asked))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_the_operations_one_by_one(
    dtype: str,
    level: str,
    checkpoint: Path,
    adapters: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, asked = Steps(monkeypatch, dtype), chosen(adapters)
    steps.run(checkpoint, asked, one_by_one=True)
    expected = steps.logits
    multiplied = dtype == "float32" or level in PAIRED
    for threads in (1, 2):
        steps.run(checkpoint, asked, threads=threads)
        assert steps.at_once == (8 if multiplied else 0)
        assert all(map(torch.equal, steps.logits, expected))
    if not multiplied:
        return
    steps.run(checkpoint, [None] * len(asked))
    assert all(not torch.equal(*each) for each in zip(steps.logits, expected, strict=True))
    for number, row in enumerate(decoding_order(asked)):
        if asked[number] is None:  # a row of the base does not change with those beside it
            assert torch.equal(steps.logits[0][number], expected[0][row])


def test_dora_beside_others_is_computed_one_by_one(
    checkpoint: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dora = save_adapter(checkpoint, tmp_path, 4, 9, use_dora=True)
    steps, asked = Steps(monkeypatch, "float32"), [dora, adapters[2], None]
    sequences = steps.run(checkpoint, asked)
    assert steps.at_once == 0
    models = [adapted_reference(checkpoint, dora), adapted_reference(checkpoint, adapters[2])]
    for sequence, model, row in zip(
        sequences, [*models, reference(checkpoint)], (1, 2, 0), strict=True
    ):
        exact = reference_logits(model, sequence.history[:-1])[-1]
        torch.testing.assert_close(steps.logits[-1][row], exact, rtol=2e-4, atol=2e-4)


def test_nothing_of_an_adapter_stays_in_the_slot_it_left(
    checkpoint: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Steps(monkeypatch, "float32")
    driver = Driver(checkpoint, 400, dtype="float32")
    assert isinstance(driver.runner.adapters, PackedAdapters)
    outputs = []
    for fresh in (False, True):
        if fresh:
            driver = Driver(checkpoint, 400, dtype="float32")
        else:
            driver.runner.unload_adapter(driver.adapter(adapters[2], 0))
        sequence = driver.sequence([5, 6, 7], adapter=driver.adapter(adapters[3], 0))
        driver.run([sequence], count=6)
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]


def test_they_are_added_to_products_of_torch(
    level: str, checkpoint: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, asked = Steps(monkeypatch, "bfloat16"), chosen(adapters)
    steps.run(checkpoint, asked, one_by_one=True)
    expected = steps.logits[0]
    monkeypatch.setattr(linears, "is_fast", lambda weight, few_rows: False)
    driver = Driver(checkpoint, dtype="bfloat16")
    packed = level in PAIRED
    assert isinstance(driver.runner.adapters, PackedAdapters if packed else CpuAdapters)
    steps.run(checkpoint, asked)
    assert steps.at_once == 0
    error = (steps.logits[0] - expected).norm() / expected.norm()
    assert error < 0.03  # bfloat16, rounded once more at each product
    steps.run(checkpoint, [None] * len(asked))
    assert (steps.logits[0] - expected).norm() / expected.norm() > 0.3
