"""The GPU benchmark's sections in order, each with the seconds that it may take."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import attention, ceilings, decode, mixed, models, workload
from engine.config import EngineConfig

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16


def _ceilings(state: Any) -> None:
    state.ceilings = ceilings.Ceilings()
    ceilings.measure(state.ceilings)


def _attention(state: Any) -> None:
    attention.measure(state.ceilings)


def _small(state: Any) -> None:
    """Qwen3-0.6B's shape: memory for all requests of the workload at their full length."""
    model = models.random_model(models.QWEN3_06B, DTYPE, DEVICE)
    runner = models.make_runner(model, blocks=34_000, most_running=256, enable_lora=False)
    runner.pool.data.normal_()
    runner.warm_up()
    state.made["small"] = model, runner
    decode.alone("qwen3_06b", model, runner, state.ceilings, aim=0.55)
    mixed.beside_a_prompt("qwen3_06b", runner)


def _config(runner_blocks: int) -> EngineConfig:
    return EngineConfig(
        model="random", num_blocks=runner_blocks, max_running=256, max_batch_tokens=8192,
        enable_lora=False,
    )  # fmt: skip


def _throughput(state: Any) -> None:
    model, runner = state.made["small"]
    workload.throughput(_config(runner.info.num_blocks), model, runner)


def _transformers(state: Any) -> None:
    model, runner = state.made.pop("small")
    workload.beside_transformers(_config(runner.info.num_blocks), model, runner)


def _large(state: Any) -> None:
    """Llama-8B's shape: one sequence, then 8 adapters of rank 16."""
    state.made.clear()
    torch.cuda.empty_cache()
    model = models.random_model(models.LLAMA_8B, DTYPE, DEVICE)
    runner = models.make_runner(model, blocks=6000, most_running=64, slots=8)
    runner.pool.data.normal_()
    runner.tune()
    decode.alone("llama_8b", model, runner, state.ceilings, aim=0.8)
    mixed.beside_a_prompt("llama_8b", runner)
    decode.with_adapters(model, runner, count=8, rank=16)


def _formats(state: Any) -> None:
    """Llama-8B's shape from codes, one sequence: the bandwidth at which the codes are read."""
    for stored in ("int4", "w8a8", "fp8"):
        _one(state, f"llama_8b_{stored}", models.LLAMA_8B, stored)


def _experts(state: Any) -> None:
    """Qwen3-30B-A3B's shape, experts in int4 and e4m3."""
    for stored in ("int4", "fp8"):
        _one(state, f"qwen3_30b_a3b_{stored}", models.QWEN3_30B_A3B, stored)


def _one(state: Any, name: str, shape: dict[str, Any], stored: str) -> None:
    state.made.clear()
    torch.cuda.empty_cache()
    model = models.random_model(shape, DTYPE, DEVICE, stored)
    runner = models.make_runner(model, blocks=6000, most_running=64, enable_lora=False)
    runner.pool.data.normal_()
    decode.alone(name, model, runner, state.ceilings, aim=0.6)


def _latent(state: Any) -> None:
    """DeepSeek V3's attention: alone, and in three layers that decode."""
    attention.measure_latent(state.ceilings)
    _one(state, "deepseek_v3_three_layers", models.DEEPSEEK_V3, "")


def _tune(state: Any) -> None:
    attention.tune()


OPTIONAL = {"tune"}  # run only when named
SECTIONS: list[tuple[str, float, Callable[[Any], None]]] = [
    ("ceilings", 30, _ceilings),
    ("attention", 50, _attention),
    ("small", 80, _small),
    ("throughput", 90, _throughput),
    ("transformers", 90, _transformers),
    ("large", 120, _large),
    ("formats", 90, _formats),
    ("experts", 90, _experts),
    ("latent", 60, _latent),
    ("tune", 90, _tune),
]
