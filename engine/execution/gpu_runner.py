"""The GPU runner: kernels, CUDA graphs for decoding, adapters inside the KV blocks, and steps that
are launched before the results of the previous step are read."""

import logging
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.batch import Row, Sampled, StepBatch
from engine.config import EngineConfig
from engine.decoding.sampling import Choice, host_samples, refuse_not_finite
from engine.execution.cuda_graphs import CHUNK_ROWS, CudaGraph, DecodeGraphs, GraphKey, PlainReplay
from engine.execution.gpu_tuning import fastest_tiles
from engine.execution.model_runner import ModelRunner
from engine.kernels.attention_launch import Partials, choose_splits, max_partials
from engine.kernels.model import KernelModel
from engine.kernels.sequence_rows import SequenceRows
from engine.kernels.skinny_launch import MAX_ROWS
from engine.kernels.step import DeviceStep, HostStep, LoraRows, StepBuffer, host_step
from engine.layers.step import order_rows
from engine.layers.transfer import on_device
from engine.lora.gpu_adapters import GpuAdapters
from engine.models.load import LoadedModel
from engine.protocol import SamplingParams

log = logging.getLogger("tollhouse.engine")


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A launched step; its results are on the host once the event has completed."""

    rows: list[Row]
    choice: Choice | None
    done: "torch.cuda.Event | None"


class GpuRunner(ModelRunner):
    """Implements `engine.batch.Runner`; `launch` returns before the device is done."""

    overlapped = True

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        spec, device = model.spec, model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton launches on the current one
        super().__init__(config, model)
        self._device = device
        self.adapters: GpuAdapters = GpuAdapters(config, spec, model.dtype, self.pool)
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 4
        )
        partials = max_partials(config.max_running, spec.heads, spec.kv_heads, self._processors)
        self._forward = KernelModel(
            model.decoder,
            self.pool,
            self._angles(torch.float32),
            self.adapters.table,
            Partials.make(partials, spec.head_dim, device),
            config.max_running,
        )
        rows = 2 * config.max_running
        width = -(-spec.context // config.block_size) + 1
        self._rows = SequenceRows(rows)
        self._tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._last = torch.zeros(rows, dtype=torch.int64, device=device)
        self._buffer = StepBuffer(config.max_batch_tokens, config.max_running, device)
        self._graphs = DecodeGraphs(
            config.max_running,
            config.max_adapter_slots,
            partial(CudaGraph, pool=torch.cuda.graph_pool_handle())
            if device.type == "cuda"
            else PlainReplay,
        )
        self._greedy: dict[int, bool] = {}  # by sequence: whether an argmax is enough

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> GpuStep:
        if batch.copies:
            self.pool.copy(batch.copies)
        if not batch.rows:
            return GpuStep([], None, None)
        decodes, prefills = order_rows(batch.rows)
        rows = decodes + prefills
        logits, sampled_rows = self._run(decodes, prefills)
        rows_to_sample = [row for row in rows if row.sample]
        if not rows_to_sample:
            # Waited for all the same: the scheduler's timing needs the true duration of steps.
            return GpuStep([], None, self._completion_event())
        choice = self._sample(rows_to_sample, logits)
        self._last.index_copy_(0, sampled_rows.long(), choice.tokens.clamp(min=0))
        return self._copy_to_host(rows_to_sample, choice)

    def collect(self, ticket: GpuStep) -> list[Sampled]:
        if ticket.done is not None:
            ticket.done.synchronize()
        return [] if ticket.choice is None else host_samples(ticket.rows, ticket.choice)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles the kernels and records every graph before the first request."""
        self.tune()
        for key in self._graphs.keys(self.adapters.rank_sizes):
            step = self._graphs.fit(padding_step(key), key)
            self._graphs.run(key, self._send(step), self._compute)

    @torch.inference_mode()
    def tune(self) -> None:
        """Chooses by measurement how steps of few tokens run. Call it before graphs are recorded."""
        spec = self._model.spec
        if self._device.type != "cuda" or spec.sandwich_norm or self._model.dtype == torch.float16:
            return
        for size in (size for size in self._graphs.sizes if size <= MAX_ROWS):
            device_step = self._send(
                self._graphs.fit(padding_step(GraphKey(size, 0)), GraphKey(size, 0))
            )
            self._forward.fused_tiles.update(
                fastest_tiles(size, self._forward.fused_tiles, partial(self._compute, device_step))
            )
            log.info("steps of %d tokens: %s", size, self._forward.fused_tiles.get(size, "plain"))

    def forget(self, seq: int) -> None:
        self._rows.forget(seq)
        self._sampler.forget(seq)
        self._greedy.pop(seq, None)

    def _run(self, decodes: list[Row], prefills: list[Row]) -> tuple[Tensor, Tensor]:
        """Logits of the sampled rows, and the sequence row of each."""
        rows = decodes + prefills
        sequence_rows, changes = self._rows.assign(rows)
        if changes:
            where = on_device(changes, self._device, torch.int64).unbind(1)
            self._tables[where[0], where[1]] = where[2].int()
        step = host_step(decodes, prefills, sequence_rows, self.pool.block_size)
        step = self.adapters.add_to(step, rows)
        key = self._graph_for(step)
        if key is None:
            device_step = self._send(step)
            return self._compute(device_step), device_step.sampled_rows
        count = len(step.sampled)
        device_step = self._send(self._graphs.fit(step, key))
        logits = self._graphs.run(key, device_step, self._compute)
        return logits[:count], device_step.sampled_rows[:count]

    def _graph_for(self, step: HostStep) -> GraphKey | None:
        """The graph that can replay this step: None if it has prompt chunks or is too large."""
        if step.decodes < len(step.table_rows) or not len(step.sampled):
            return None
        lora = step.lora
        if lora is None:
            return self._graphs.key(step.decodes, 0, 0)
        if lora.chunk_rows != CHUNK_ROWS:
            return None
        active = len({slot for slot, _, _ in lora.chunks.tolist()})
        return self._graphs.key(step.decodes, active, lora.max_rank)

    def _compute(self, step: DeviceStep) -> Tensor:
        return self._forward(step, self._last)

    def _send(self, step: HostStep) -> DeviceStep:
        spec, decodes = self._model.spec, max(1, step.decodes)
        splits = choose_splits(decodes, spec.kv_heads, spec.context, self._processors)
        return self._buffer.send(step, self._tables, splits)

    def _sample(self, rows: list[Row], logits: Tensor) -> Choice:
        if all(self._is_greedy(row) for row in rows):
            greatest, tokens = logits.max(-1)
            return Choice(refuse_not_finite(tokens, greatest), None, None)
        logits = logits.float()
        cap = self._model.spec.logit_cap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return self._sampler(rows, logits)

    def _is_greedy(self, row: Row) -> bool:
        greedy = self._greedy.get(row.seq)
        if greedy is None:
            greedy = self._greedy[row.seq] = is_greedy(row.sampling)
        return greedy

    def _copy_to_host(self, rows: list[Row], choice: Choice) -> GpuStep:
        if self._device.type != "cuda":
            return GpuStep(rows, choice, None)
        top = None if choice.top is None else (_to_host(choice.top[0]), _to_host(choice.top[1]))
        logprobs = None if choice.logprobs is None else _to_host(choice.logprobs)
        on_host = Choice(_to_host(choice.tokens), logprobs, top)
        return GpuStep(rows, on_host, self._completion_event())

    def _completion_event(self) -> "torch.cuda.Event | None":
        """An event that completes when the device has done all work launched so far."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def is_greedy(params: SamplingParams) -> bool:
    """Whether the highest logit is always the sampled token."""
    return (
        params.temperature < 1e-5
        and params.logprobs is None
        and params.min_tokens == 0
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.frequency_penalty == 0.0
        and params.presence_penalty == 0.0
    )


def padding_step(key: GraphKey) -> HostStep:
    """A step of padding alone, with which graphs are recorded before there is a request."""
    none = np.zeros(0, np.int32)
    lora = None
    if key.adapters:
        lora = LoraRows(none, none.reshape(0, 3), CHUNK_ROWS, key.max_rank)
    start = np.zeros(1, np.int32)
    return HostStep(none, none, none, none, none, start, none, none, 0, lora)


def _to_host(tensor: Tensor) -> Tensor:
    """An asynchronous copy to pinned host memory; complete once the stream has executed it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
