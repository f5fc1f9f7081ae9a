"""The GPU benchmark's sections in order, each with the seconds that it may take."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import attention, ceilings, decode, mixed, models, workload
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.sizes import Place, Sizes
from engine.config import EngineConfig
from engine.models.load import LoadedModel
from engine.runners.gpu.runner import GpuRunner

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16


@dataclass
class State:
    """What one section leaves for the next."""

    sizes: Sizes
    ceilings: Ceilings = field(default_factory=Ceilings)
    small: tuple[LoadedModel, GpuRunner] | None = None  # once it is warm


def _ceilings(state: State) -> None:
    ceilings.measure(state.ceilings, state.sizes)


def _attention(state: State) -> None:
    attention.measure(state.ceilings, state.sizes)


def _runner(model: LoadedModel, place: Place, **settings: Any) -> GpuRunner:
    runner = models.make_runner(
        model, place.blocks, place.sequences, max_batch_tokens=place.tokens, **settings
    )
    runner.pool.data.normal_()
    return runner


def _warm_small(state: State) -> tuple[LoadedModel, GpuRunner]:
    """Qwen3-0.6B's shape, which three sections use: by itself each makes it."""
    if state.small is None:
        model = models.random_model(state.sizes.small, DTYPE, DEVICE)
        runner = _runner(model, state.sizes.of_small, enable_lora=False)
        runner.warm_up()
        state.small = model, runner
    return state.small


def _small(state: State) -> None:
    model, runner = _warm_small(state)
    decode.alone("qwen3_06b", model, runner, state.ceilings, state.sizes.steps, aim=0.55)
    mixed.beside_a_prompt("qwen3_06b", runner, state.sizes.steps)


def _config(state: State) -> EngineConfig:
    place = state.sizes.of_small
    return EngineConfig(
        model="random", num_blocks=place.blocks, max_running=place.sequences,
        max_batch_tokens=place.tokens, enable_lora=False,
    )  # fmt: skip


def _throughput(state: State) -> None:
    workload.throughput(_config(state), *_warm_small(state), state.sizes.work)


def _transformers(state: State) -> None:
    model, runner = _warm_small(state)
    workload.beside_transformers(_config(state), model, runner, state.sizes)


def _large(state: State) -> None:
    """Llama-8B's shape: one sequence, then adapters."""
    sizes = state.sizes
    model = models.random_model(sizes.large, DTYPE, DEVICE)
    runner = _runner(model, sizes.of_others, slots=sizes.steps.adapters)
    runner.tune()
    decode.alone("llama_8b", model, runner, state.ceilings, sizes.steps, aim=0.8)
    mixed.beside_a_prompt("llama_8b", runner, sizes.steps)
    decode.with_adapters(model, runner, sizes.steps)


def _formats(state: State) -> None:
    """Llama-8B's shape from codes, one sequence: the bandwidth at which the codes are read."""
    for stored in ("int4", "w8a8", "fp8"):
        _one(state, f"llama_8b_{stored}", state.sizes.large, stored)


def _experts(state: State) -> None:
    """Qwen3-30B-A3B's shape, experts in int4 and e4m3."""
    for stored in ("int4", "fp8"):
        _one(state, f"qwen3_30b_a3b_{stored}", state.sizes.experts, stored)


def _one(state: State, name: str, shape: dict[str, Any], stored: str) -> None:
    torch.cuda.empty_cache()
    model = models.random_model(shape, DTYPE, DEVICE, stored)
    runner = _runner(model, state.sizes.of_others, enable_lora=False)
    decode.alone(name, model, runner, state.ceilings, state.sizes.steps, aim=0.6)


def _latent(state: State) -> None:
    """DeepSeek V3's attention: alone, and in three layers that decode."""
    attention.measure_latent(state.ceilings, state.sizes)
    _one(state, "deepseek_v3_three_layers", state.sizes.latent, "")


def _tune(state: State) -> None:
    attention.tune()


OPTIONAL = {"tune"}  # run only when named
SHARED = {"small", "throughput", "transformers"}  # one model, kept from one to the next
SECTIONS: list[tuple[str, float, Callable[[State], None]]] = [
    ("ceilings", 30, _ceilings),
    ("attention", 60, _attention),
    ("small", 120, _small),
    ("throughput", 90, _throughput),
    ("transformers", 150, _transformers),
    ("large", 150, _large),
    ("formats", 120, _formats),
    ("experts", 100, _experts),
    ("latent", 60, _latent),
    ("tune", 90, _tune),
]
# Each of these calls ends within eight minutes, limits of its sections included.
CALLS = (
    ("attention", "small", "throughput", "transformers"),
    ("large", "formats", "experts", "latent"),
)


def chosen(names: set[str] | None) -> list[tuple[str, float, Callable[[State], None]]]:
    """The sections to run: all but the optional ones, or those named and what they stand on."""
    return [
        each
        for each in SECTIONS
        if (each[0] not in OPTIONAL if names is None else each[0] in names or each[0] == "ceilings")
    ]


def bodies(names: set[str] | None, sizes: Sizes) -> list[tuple[str, float, Callable[[], None]]]:
    """Each leaves the device's memory as it was, but for a model that a later one of these uses."""
    state, sections = State(sizes), chosen(names)
    last = max((n for n, each in enumerate(sections) if each[0] in SHARED), default=-1)

    def run(body: Callable[[State], None], number: int) -> None:
        try:
            body(state)
        finally:
            if number >= last:
                state.small = None

    return [
        (name, seconds, partial(run, body, n)) for n, (name, seconds, body) in enumerate(sections)
    ]
