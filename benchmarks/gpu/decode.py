"""Decoding steps of a whole model: how near to the memory's limit, and what adapters add."""

import time

import torch

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.figures import figure, say
from benchmarks.gpu.models import random_adapter, read_once
from benchmarks.gpu.sizes import Steps
from engine.batch import LAST_SAMPLED, AdapterHandle, Row, StepBatch
from engine.models.load import LoadedModel
from engine.protocol import SamplingParams
from engine.runners.gpu.runner import GpuRunner

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
BLOCK = 16


class Decoding:
    """Sequences that decode side by side, each step launched before the last one is read."""

    def __init__(
        self,
        runner: GpuRunner,
        sequences: int,
        context: int,
        steps: int,
        handles: list[AdapterHandle] | None = None,
        first_block: int = 0,
    ) -> None:
        self._runner = runner
        self._at = context
        per_sequence = -(-(context + 3 * steps + 8) // BLOCK)
        order = torch.randperm(sequences * per_sequence).add(first_block)
        self._blocks: list[list[int]] = order.view(sequences, -1).tolist()
        self._handles = [
            None if not handles else handles[i % len(handles)] for i in range(sequences)
        ]
        self._steps = steps
        self._first = True

    def step_ms(self) -> float:
        """Mean time of a step, after a warm-up that also records the graph."""
        self._run(8)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._run(self._steps)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / self._steps * 1e3

    def finish(self) -> None:
        for seq in range(len(self._blocks)):
            self._runner.forget(seq)

    def _run(self, steps: int) -> None:
        before = None
        for _ in range(steps):
            ticket = self._runner.launch(self._batch())
            if before is not None:
                self._runner.collect(before)
            before = ticket
        if before is not None:
            self._runner.collect(before)

    def _batch(self) -> StepBatch:
        token = 5 if self._first else LAST_SAMPLED
        self._first = False
        at = self._at
        self._at += 1
        return StepBatch(
            [
                Row(seq, [token], at, blocks[: at // BLOCK + 1], handle, True, GREEDY, 0, [], 0)
                for seq, (blocks, handle) in enumerate(
                    zip(self._blocks, self._handles, strict=True)
                )
            ]
        )


def alone(
    name: str,
    model: LoadedModel,
    runner: GpuRunner,
    ceilings: Ceilings,
    sizes: Steps,
    *,
    aim: float,
) -> None:
    """One sequence: the share of the memory's bandwidth that reading the weights makes up."""
    context = sizes.context // 2
    decoding = Decoding(runner, 1, context, sizes.count)
    ms = decoding.step_ms()
    decoding.finish()
    spec = model.spec
    cached = spec.cached_layers * spec.cached_heads * spec.head_dim
    keys = cached * (context + sizes.count // 2) * model.dtype.itemsize
    moved = read_once(model) + keys
    figure(
        f"gpu_decode_alone_{name}", moved / ms * 1e3 / 1e12, "TB/s",
        peer="measured copy bandwidth", peer_value=ceilings.copy / 1e12, at_least=aim - 0.1, aim=aim,
        settings={"tokens_per_second": round(1e3 / ms, 1), "bytes_a_token": moved},
    )  # fmt: skip


def with_adapters(model: LoadedModel, runner: GpuRunner, sizes: Steps) -> None:
    """Steps with adapters beside the same steps without any."""
    count, rank = sizes.adapters, sizes.rank
    handles = []
    first = 0
    for seed in range(count):
        weights = random_adapter(model.spec, rank, seed, model.dtype)
        runner.adapters.keep(weights)
        needed = runner.adapter_blocks(weights.digest)
        handle = AdapterHandle(weights.digest, seed, 1)
        runner.load_adapter(handle, list(range(first, first + needed)))
        handles.append(handle)
        first += needed
    say(f"{count} adapters of rank {rank} lie in {first} blocks")
    for sequences in sizes.sequences:
        times = []
        for used in ([], handles):
            decoding = Decoding(
                runner, sequences, sizes.context, max(1, sizes.count // 2), used, first
            )
            times.append(decoding.step_ms())
            decoding.finish()
        base, adapted = times
        figure(
            f"gpu_lora_overhead_{sequences}", (adapted / base - 1) * 100, "%",
            higher_is_better=False, at_least=20.0, aim=12.0,
            settings={"adapters": count, "rank": rank, "base_ms": round(base, 3),
                      "adapted_ms": round(adapted, 3), "context": sizes.context},
        )  # fmt: skip
    for handle in handles:
        runner.unload_adapter(handle)
        runner.drop_adapter(handle.digest)
