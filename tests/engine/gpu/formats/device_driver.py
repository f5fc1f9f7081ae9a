"""The GPU's runner over host memory, as a driver: a checkpoint is loaded for `cuda`, and its kernels
run in the interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.layers.linear import Linear
from engine.runners.gpu import runner as gpu_runner
from engine.runners.gpu.cuda_graphs import PlainReplay
from tests.engine.checkpoints import VOCAB, reference_logits
from tests.engine.driver import Driver, Sequence, greedy
from tests.engine.gpu.cuda_stand_in import Launches, numbers_on_the_host

SETTINGS = {
    "device": "cuda", "dtype": "float32", "max_batch_tokens": 128, "max_running": 4,
    "max_adapter_slots": 2, "max_lora_rank": 16,
}  # fmt: skip


@contextmanager
def stand_in(patch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Graphs call their function again, and the start launches nothing: it takes the interpreter long."""
    patch.setattr(gpu_runner, "CudaGraph", lambda function, pool=None: PlainReplay(function))
    patch.setattr(gpu_runner.GpuRunner, "warm_up", lambda runner: None)
    with numbers_on_the_host(patch) as launches:
        yield launches


def device_driver(checkpoint: Path, **settings: Any) -> Driver:
    return Driver(checkpoint, **(SETTINGS | settings))


def linears(driver: Driver) -> list[Linear]:
    """Of the layers, without the head."""
    return driver.runner._model.decoder.linears[:-1]


def assert_answers(
    driver: Driver,
    model: Any,
    prompts: list[list[int]],
    count: int = 2,
    atol: float = 2e-4,
    *,
    chunk: int = 0,
) -> None:
    """Side by side, a prompt's last logits and those of the tokens after it, as `transformers` has
    them for the weights of `model`. Prompts go in chunks of `chunk` tokens; 0: whole."""
    sequences = [driver.sequence(each, greedy(logprobs=VOCAB)) for each in prompts]
    driver.run(sequences, chunk, count)
    for sequence in sequences:
        found = likely(sequence)
        ids = sequence.history[: sequence.prompt_len + count - 1]
        expected = reference_logits(model, ids)[sequence.prompt_len - 1 :].log_softmax(-1)
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def likely(sequence: Sequence) -> torch.Tensor:
    """The log-probabilities of all tokens, by sampled token."""
    tops = [dict((sample.logprobs or [])[0].top) for sample in sequence.samples]
    return torch.tensor([[top[token] for token in range(VOCAB)] for top in tops])
