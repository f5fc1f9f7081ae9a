"""All layers in one call: the logits of `transformers`, and the bits of the operations one by one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.compiled.linear import PAIRED
from engine.batch import StepBatch
from engine.decoding.sampling import Sampler
from engine.models import linears
from engine.runners.cpu.decoded_layers import DecodedLayers
from tests.engine.checkpoints import VOCAB, reference, reference_greedy, reference_logits
from tests.engine.checkpoints import save_checkpoint as save_any
from tests.engine.cpu.conftest import LEVELS
from tests.engine.driver import Driver
from tests.engine.models.test_family_parity import CASES

LENGTHS = [3, 17, 40, 70, 5]
WIDE = {"intermediate_size": 128}
WHOLE = {"mixtral": {"head_dim": 16}}  # so that widths are multiples of 32
SERVED = [
    "llama",
    "llama-mha-biased",
    "llama-mqa-wide-heads",
    "llama-yarn",
    "mistral",
    "granite",
    "mixtral",
    "qwen3",
]
OTHERS = [
    "gemma2",
    "olmo2",
    "command-r",
    "qwen2-windows",
    "qwen2-moe",
    "smollm3",
    "gemma3",
]


def save_checkpoint(folder: Path, case: str) -> Path:
    family, changes = CASES[case]
    return save_any(folder, family, **(changes | WIDE | WHOLE.get(case, {})))


class Steps:
    """How many steps were computed in one call, and the logits of every step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
        self.at_once, self.logits, self.dtype = 0, list[torch.Tensor](), dtype
        layers, sample = DecodedLayers.__call__, Sampler.__call__

        def _layers(given: DecodedLayers, *rest: Any) -> Any:
            found = layers(given, *rest)
            self.at_once += found is not None
            return found

        def _sample(sampler: Sampler, rows: Any, logits: torch.Tensor, *rest: Any) -> Any:
            self.logits.append(logits.clone())
            return sample(sampler, rows, logits, *rest)

        monkeypatch.setattr(DecodedLayers, "__call__", _layers)
        monkeypatch.setattr(Sampler, "__call__", _sample)
        monkeypatch.setattr(linears, "is_fast", lambda weight, few_rows: True)

    def run(
        self,
        checkpoint: Path,
        adapters: Sequence[Path | None] = (None,) * len(LENGTHS),
        *,
        one_by_one: bool = False,
        threads: int = 2,
        **settings: object,
    ) -> list[Any]:
        """Nine tokens after each prompt, in one batch, each with its adapter."""
        driver = Driver(checkpoint, 400, dtype=self.dtype, threads=threads, **settings)
        if one_by_one:
            driver.runner._layers = None
        handles: dict[Path | None, Any] = {None: None}
        for path in adapters:
            if path is not None and path not in handles:
                handles[path] = driver.adapter(path, len(handles) - 1)
        draw = torch.Generator().manual_seed(5)
        lengths = [LENGTHS[n % len(LENGTHS)] for n in range(len(adapters))]
        prompts = [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths]
        sequences = [
            driver.sequence(prompt, adapter=handles[path])
            for prompt, path in zip(prompts, adapters, strict=True)
        ]
        self.at_once, self.logits = 0, []
        driver.run(sequences, count=9)
        return sequences


@pytest.mark.parametrize(
    ("level", "case"),
    [
        (level, case)
        for level in LEVELS
        for case in (SERVED if level == "avx2" else ("llama-mha-biased", "mixtral", "qwen3"))
    ],
    indirect=["level"],
)
def test_logits_are_those_of_transformers(
    case: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, steps = save_checkpoint(tmp_path, case), Steps(monkeypatch, "float32")
    sequences, model = steps.run(checkpoint), reference(checkpoint)
    assert steps.at_once == 8  # all but the prompts'
    for number, sequence in enumerate(sequences):
        exact = reference_logits(model, sequence.history[:-1])[-1]
        torch.testing.assert_close(steps.logits[-1][number], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-mha-biased", "mixtral", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_the_operations_one_by_one(
    dtype: str, case: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, steps = save_checkpoint(tmp_path, case), Steps(monkeypatch, dtype)
    steps.run(checkpoint, one_by_one=True)
    expected = steps.logits
    multiplied = dtype == "float32" or level in PAIRED
    for threads in (1, 2):
        steps.run(checkpoint, threads=threads)
        assert steps.at_once == (8 if multiplied else 0)
        assert all(map(torch.equal, steps.logits, expected))


@pytest.mark.parametrize("case", OTHERS)
def test_other_layers_are_computed_one_by_one(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, "float32")
    steps.run(save_checkpoint(tmp_path, case))
    assert steps.at_once == 0


@pytest.mark.parametrize("count, drafts", [(1, 3), (1, 7), (2, 5)])
def test_a_step_that_verifies_guesses_is_one_call(
    count: int, drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens of a sequence that is alone, and of two: the logits of `transformers`."""
    checkpoint, steps = save_checkpoint(tmp_path, "llama"), Steps(monkeypatch, "float32")
    ids = torch.randint(3, VOCAB, (30,), generator=torch.Generator().manual_seed(8)).tolist()
    driver, model = Driver(checkpoint, 400, dtype="float32"), reference(checkpoint)
    sequences = [driver.sequence(ids[n:]) for n in range(count)]
    driver.run(sequences, count=1)
    said = [reference_greedy(model, each.history, drafts) for each in sequences]
    rows = []
    for sequence, guesses in zip(sequences, said, strict=True):
        history = list(sequence.history)
        sequence.history += guesses
        rows.append(replace(driver._row(sequence, 0), drafts=drafts, history=history))
    steps.at_once, steps.logits = 0, []
    found = driver.runner.collect(driver.runner.launch(StepBatch(rows)))
    assert steps.at_once == 1
    for number, (sequence, guesses) in enumerate(zip(sequences, said, strict=True)):
        exact = reference_logits(model, sequence.history)[-drafts - 1 :]
        logits = steps.logits[0][number * (drafts + 1) :][: drafts + 1]
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
        assert found[number].tokens == [*guesses, int(exact[-1].argmax())]
