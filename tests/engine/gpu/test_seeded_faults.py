"""What the checks without a GPU are for: each finds a fault of its kind that is put in here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from benchmarks.gpu import models, sections
from engine.backends.gpu import operations
from engine.decoding import truncation
from engine.runners.gpu import runner as gpu_runner
from tests.engine.gpu import test_runner_strict as strict
from tests.engine.gpu.cuda_stand_in import cache_operations, fake_device

NAMELESS = torch.device("cuda")  # the default device by name, which has no number


def check_steps(patch: pytest.MonkeyPatch) -> None:
    """The check that runs every kind of step."""
    with fake_device(patch) as launches:
        cache_operations(patch)
        strict.test_a_launch_waits_neither_for_the_device_nor_for_a_kernel(
            launches, patch, "llama", "auto", lora=False
        )


def test_the_check_of_steps_passes_as_the_code_is(monkeypatch: pytest.MonkeyPatch) -> None:
    check_steps(monkeypatch)


def test_a_device_without_a_number_cannot_be_made_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strict, "choose_device", lambda name: NAMELESS)
    with pytest.raises(ValueError, match="specified index"):
        strict.test_every_name_of_the_device_can_be_made_the_current_one("cuda", monkeypatch)


def test_a_benchmark_on_a_device_without_a_number_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sections, "DEVICE", NAMELESS)
    with pytest.raises(ValueError, match="specified index"):
        check_steps(monkeypatch)


def test_a_runner_on_a_device_without_a_number_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_device(monkeypatch):
        model = models.random_model(strict.SHAPE, torch.bfloat16, NAMELESS)
        with pytest.raises(ValueError, match="specified index"):
            models.make_runner(model, 160, 16, enable_lora=False, max_batch_tokens=256)


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Makes `owner.name` begin with the fault, which gets its arguments."""
    original = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        fault(*args, **kwargs)
        return original(*args, **kwargs)

    patch.setattr(owner, name, faulty)


def test_sampling_that_reads_from_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before(monkeypatch, truncation, "_mask_atypical_", lambda gaps, *_: bool((gaps > -1).any()))
    with pytest.raises(DataDependentOutputException):
        check_steps(monkeypatch)


def test_a_launch_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before(monkeypatch, gpu_runner, "order_rows", lambda *_: torch.cuda.synchronize())
    with pytest.raises(AssertionError, match="waits"):
        check_steps(monkeypatch)


def test_a_tensor_on_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = operations.gated
    monkeypatch.setattr(operations, "gated", lambda x, **kind: gated(x, **kind).cpu())
    with pytest.raises((AssertionError, RuntimeError), match=r"host|device"):
        check_steps(monkeypatch)
