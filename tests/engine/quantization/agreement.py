"""What every format of quantised weights is asked: the dense model's logits, and an adapter on top."""

import warnings
from pathlib import Path
from typing import Any

import peft
import torch

from tests.engine.checkpoints import (
    VOCAB,
    reference,
    reference_greedy,
    reference_logits,
    save_adapter,
)
from tests.engine.driver import Driver, LogitDriver

PROMPT = [5, 9, 12, 40, 33, 71, 8, 100, 6]


def some_ids(count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(8)).tolist()


def assert_logits_of_the_dense_model(dense: Path, served: Path) -> None:
    """In float32, with a prompt cut in two beside another sequence."""
    ids = some_ids(50)
    expected = reference_logits(reference(dense), ids)
    driver = LogitDriver(served, dtype="float32", quantization="none")
    sequence, beside = driver.sequence(ids), driver.sequence(some_ids(30))
    found = torch.cat([driver.logits(sequence, 31, (beside, 9)), driver.logits(sequence, 19)])
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def assert_adapter_agrees(
    dense: Path, served: Path, model: Any, scratch: Path, **settings: Any
) -> None:
    """Greedy answers of a sequence with an adapter and of one without, in one batch. `model` is the
    reference for the weights as they are served; the adapter is made for `dense`."""
    adapter = save_adapter(dense, scratch / "adapter", rank=6, seed=4)
    driver = Driver(served, dtype="float32", **settings)
    adapted = driver.sequence(PROMPT, adapter=driver.adapter(adapter, 0))
    plain = driver.sequence(PROMPT)
    driver.run([adapted, plain], chunk=4, count=12)
    assert plain.output == reference_greedy(model, PROMPT, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    assert adapted.output == reference_greedy(model, PROMPT, 12) != plain.output
