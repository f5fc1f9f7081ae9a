"""Quantised weights and experts on a device that has no content: no step waits, and none launches a
variant of a kernel that the start did not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu import models, sections
from engine.adapters.files import AdapterWeights
from engine.backends.layers.adapter_extras import AdapterExtras
from engine.batch import AdapterHandle, StepBatch
from engine.protocol import SamplingParams
from tests.engine.gpu.cuda_stand_in import Launches, cache_operations, fake_device
from tests.engine.gpu.test_runner_strict import (
    SHAPE,
    launch_adapter_steps,
    launch_steps,
    load_adapters,
    row,
)

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu", "benchmarks/gpu")
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16,
    "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 24,
}  # fmt: skip
KERNELS = {
    "int4": {"product_kernel"},
    "w8a8": {"round_rows_kernel", "scaled_kernel"},
    "fp8": {"round_rows_kernel", "scaled_kernel"},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with fake_device(monkeypatch) as launches:
        cache_operations(monkeypatch)
        yield launches


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.proof), True])
@pytest.mark.parametrize("stored", ["int4", pytest.param("w8a8", marks=pytest.mark.proof), "fp8"])
def test_steps_over_codes(device: Launches, stored: str, lora: bool) -> None:
    shape = SHAPE | {"head_dim": 32, "hidden_size": 128, "intermediate_size": 256}
    model = models.random_model(shape, torch.bfloat16, sections.DEVICE, stored)
    runner = models.make_runner(
        model, blocks=400, most_running=16, slots=2, enable_lora=lora, max_batch_tokens=512
    )
    runner.warm_up()
    assert KERNELS[stored] <= set(device.kernels)
    assert "skinny_kernel" not in device.kernels
    check(device, runner, 1 if not lora else 2, model if lora else None)


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        (MIXTURE, ""),
        pytest.param(MIXTURE, "int4", marks=pytest.mark.proof),
        (MIXTURE, "fp8"),
        (GPT_OSS, "mxfp4"),
    ],
)
def test_steps_over_experts(device: Launches, family: dict[str, Any], stored: str) -> None:
    model = models.random_model(SHAPE | family, torch.bfloat16, sections.DEVICE, stored)
    runner = models.make_runner(
        model, blocks=400, most_running=16, enable_lora=False, max_batch_tokens=512
    )
    runner.warm_up()
    assert {"product_kernel", "sum_choices_kernel"} <= set(device.kernels)
    check(device, runner, 1, None)


def test_adapters_of_experts_make_no_step_wait(device: Launches) -> None:
    model = models.random_model(SHAPE | MIXTURE, torch.bfloat16, sections.DEVICE)
    runner = models.make_runner(
        model, blocks=400, most_running=16, slots=2, enable_lora=True, max_batch_tokens=512
    )
    handles, last = [], 400
    for slot, rank in enumerate((3, 16)):
        pairs = {
            (layer, f"experts.{n}.{side}"): (torch.zeros(rank, width), torch.zeros(rank, out))
            for layer in range(2)
            for n in range(8)
            for side, width, out in (("gate", 64, 48), ("up", 64, 48), ("down", 48, 64))
        }
        weights = AdapterWeights(f"{slot:064x}", rank, {}, AdapterExtras(pairs=pairs))
        runner.adapters.keep(weights)
        count = runner.adapter_blocks(weights.digest)
        handles.append(AdapterHandle(weights.digest, slot, 1))
        runner.load_adapter(handles[-1], list(range(last - count, last)))
        last -= count
    waits, before = device.waits, len(device.kernels)
    launch_adapter_steps(runner, handles)
    assert device.waits == waits
    # Of each layer of a step: one for both matrices of the inside, and one for the other.
    launched = device.kernels[before:]
    assert launched.count("fused_kernel") + launched.count("expand_kernel") >= 2 * 2 * 8
    assert "graph" not in launched


def check(device: Launches, runner: object, slots: int, adapted: object) -> None:
    waits, warm = device.waits, set(device.variants)
    launch_steps(runner)  # type: ignore[arg-type]
    for tokens in (1, 2, 16, 17, 255, 256):
        params = SamplingParams(max_tokens=9, temperature=0.0)
        many = [row(n, [5] * tokens, 0, params, blocks=[n] * 20) for n in range(2)]
        runner.launch(StepBatch(many))  # type: ignore[attr-defined]
    if adapted is not None:
        launch_adapter_steps(runner, load_adapters(runner, adapted.spec))  # type: ignore[arg-type,attr-defined]
    assert device.waits == waits
    assert not device.variants - warm
