"""The GPU runner: kernels, CUDA graphs for steps of few tokens, adapters inside the KV blocks, and
steps that are launched before the results of the previous step are read."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from engine.backends.gpu.attention_launch import (
    Partials,
    choose_splits,
    key_programs,
    max_partials,
    mix_limits,
)
from engine.backends.gpu.attention_reference import Answers
from engine.backends.gpu.launch import MAX_ROWS
from engine.backends.gpu.observed import (
    OBSERVING_BYTES,
    Observations,
    one_sight_each,
    with_attention,
)
from engine.backends.gpu.part_tables import PartTables
from engine.backends.gpu.sequence_rows import SequenceRows
from engine.backends.gpu.step import DeviceStep, HostStep, StepBuffer, host_step
from engine.backends.layers.logits import changes_logits, finish_logits
from engine.backends.layers.step import order_rows
from engine.backends.layers.transfer import on_device
from engine.batch import LAST_SAMPLED, Row, Sampled, StepBatch
from engine.config import EngineConfig
from engine.decoding.edits import reads_history
from engine.decoding.sampler.launch import LastTokens, sample
from engine.decoding.sampling import Choice, host_samples, is_greedy
from engine.decoding.truncation import without_rare
from engine.models.load import LoadedModel
from engine.protocol import SamplingParams
from engine.runners.gpu.adapters import GpuAdapters
from engine.runners.gpu.cuda_graphs import CudaGraph, GraphKey, PlainReplay, Recorded, StepGraphs
from engine.runners.gpu.expert_loads import ExpertLoads
from engine.runners.gpu.kernel_model import KernelModel
from engine.runners.gpu.tuning import fastest_tiles
from engine.runners.gpu.warm_up import compiling_params, compiling_steps, padding_step, prompt_step
from engine.runners.model_runner import ModelRunner
from engine.speculation.verify import sampled_rows, verified

log = logging.getLogger("tollhouse.engine")

_SAMPLING_COPIES = 6  # float32 copies of the logits of a full batch that sampling holds at once


@dataclass(slots=True)
class GpuStep:
    """A launched step; its results are on the host once the event has completed."""

    rows: list[Row]  # sampled
    sampled_rows: list[Row] = field(default_factory=list)  # one for each token, once it is sampled
    choice: Choice | None = None
    done: "torch.cuda.Event | None" = None
    # Logits of the rows and their sequence rows, while the step is not sampled yet.
    logits: tuple[Tensor, Tensor] | None = None
    loads: Tensor | None = None  # rows that each expert has computed so far
    attention: dict[int, Tensor] = field(default_factory=dict)  # of prompts that it ends


class KernelChoice:
    """The tokens of a step's rows, which the next step finds in `last`. Where rows of one sequence verify
    guesses it is not read: the host knows it before the next row."""

    def __init__(self, device: torch.device) -> None:
        self.last = torch.zeros(1, dtype=torch.int64, device=device)  # by sequence row
        # Of the step that is being sampled: the sequence row of each row of logits.
        self.of_sequences = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self, logits: Tensor, params: list[SamplingParams], uniforms: list[float]
    ) -> Tensor:
        last = LastTokens(self.last, self.of_sequences)
        return sample(without_rare(logits, params), params, uniforms, last)


class GpuRunner(ModelRunner):
    """Implements `engine.batch.Runner`; `launch` returns before the device is done."""

    overlapped = in_pages = True
    scores_prompts = False

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        spec, device = model.spec, model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton launches on the current one
        sized = config.num_blocks is not None or config.kv_memory_bytes is not None
        reserved = 0 if sized or device.type != "cuda" else reserved_bytes(config, model)
        self._choose = KernelChoice(device)
        super().__init__(config, model, reserved, self._choose)
        self._device = device
        self._config = config
        self.adapters: GpuAdapters = GpuAdapters(config, spec, model.dtype, self.pool)
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 4
        )
        self._key_programs = key_programs(spec, config.kv_dtype != "auto")
        partials = max_partials(
            config.max_running, spec.heads, self._key_programs, self._processors
        )
        width = spec.head_dim if spec.latent is None else spec.latent.latent
        self._forward = KernelModel(
            model.decoder,
            self.pool,
            self._angles(torch.float32),
            self.adapters.table,
            Partials.make(partials, width, device),
            config.max_running,
        )
        rows = 2 * config.max_running
        width = blocks = -(-spec.context // config.block_size) + 1
        answers = None
        if config.kv_heavy:
            answers = Answers(config.kv_sight, width, config.kv_heavy // config.block_size)
            width += 2 + 2 * answers.blocks
        parts = PartTables(self.windowed, width, blocks, config.block_size)
        self._rows = SequenceRows(rows, answers, parts)
        self._observations = Observations(config.block_size, device)
        self._tables = torch.zeros(rows, parts.width, dtype=torch.int32, device=device)
        self._choose.last = torch.zeros(rows, dtype=torch.int64, device=device)
        self._compute = partial(self._forward, last=self._choose.last)
        most = config.max_batch_tokens, config.max_running
        self._buffer = StepBuffer(*most, device, answers, parts)
        record: Callable[[Callable[[], Tensor]], Recorded] = PlainReplay
        if device.type == "cuda":
            record = partial(CudaGraph, pool=torch.cuda.graph_pool_handle())
        self._loads = ExpertLoads(model.decoder, device)
        self._graphs = StepGraphs(
            config.max_running,
            config.max_batch_tokens,
            config.max_adapter_slots,
            partial(self._loads.uncounted, record),
        )
        self.expert_rows = self._loads.rows
        self._unsampled: GpuStep | None = None

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> GpuStep:
        self._sample_unsampled()
        if batch.copies:
            self.pool.copy(batch.copies, batch.part_copies)
        if not batch.rows:
            return GpuStep([])
        decodes, prefills = order_rows(one_sight_each(batch.rows))
        rows = decodes + prefills
        logits, of_sequences = self._run(decodes, prefills)
        rows_to_sample = [row for row in rows if row.sample]
        if not rows_to_sample:
            # Waited for all the same: the scheduler's timing needs the true duration of steps.
            loads = self._loads.copied()
            return GpuStep([], done=self._completion_event(), loads=loads)
        step = GpuStep(rows_to_sample, logits=(logits, of_sequences), loads=self._loads.copied())
        step.attention = self._observations.take(rows_to_sample)
        if any(self._sampled_later(row) for row in rows_to_sample):
            self._unsampled = step
        else:
            self._sample(step)
        return step

    @torch.inference_mode()
    def collect(self, ticket: GpuStep) -> list[Sampled]:
        if ticket is self._unsampled:
            self._sample_unsampled()
        if ticket.done is not None:
            ticket.done.synchronize()
        if ticket.loads is not None:
            self._loads.keep(ticket.loads)
        if ticket.choice is None:
            return []
        found = host_samples(ticket.sampled_rows, ticket.choice)
        sampled = self._sampler.accept(ticket.rows, verified(ticket.rows, found))
        return with_attention(sampled, ticket.attention)

    def _sampled_later(self, row: Row) -> bool:
        """Whether the row's sampling must know the id that the step before samples. Such a step is
        sampled when that id has been collected, while the device computes this step's logits."""
        return row.tokens[0] == LAST_SAMPLED and reads_history(row.sampling)

    def _sample_unsampled(self) -> None:
        if self._unsampled is not None:
            step, self._unsampled = self._unsampled, None
            self._sample(step)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Records every graph and compiles the kernels of all other steps before the first request."""
        self.tune()
        for key in self._graphs.keys(self.adapters.rank_sizes):
            step = self._graphs.fit(padding_step(key), key)
            self._graphs.run(key, self._send(step), self._compute)
        most, context = self._config.max_batch_tokens, self._model.spec.context
        for step in compiling_steps(most, context, self.adapters.rank_sizes):
            self._compute(self._send(step))
        for dtype in {torch.float32, self._model.dtype}:
            logits = torch.zeros(1, self._model.spec.vocab, dtype=dtype, device=self._device)
            for params in compiling_params():
                self._choose(logits, [params], [0.0])

    @property
    def largest_graph(self) -> int:
        """Its tokens."""
        return max(self._graphs.sizes[-1], self._graphs.mixed_sizes[-1])

    @torch.inference_mode()
    def run_prompts(self, tokens: int, most_sampled: int) -> None:
        """Computes prompts of so many tokens, to see what memory that takes."""
        rank = max(self.adapters.rank_sizes, default=0)
        context = self._model.spec.context
        self._compute(self._send(prompt_step(tokens, 0, most_sampled, context, rank)))

    @torch.inference_mode()
    def tune(self) -> None:
        """Chooses by measurement how steps of few tokens run. Call it before graphs are recorded."""
        if self._device.type != "cuda" or self._model.dtype == torch.float16:
            return
        if not self._forward.fusable:
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
        self._observations.forget(seq)
        self._sampler.forget(seq)

    def _run(self, decodes: list[Row], prefills: list[Row]) -> tuple[Tensor, Tensor]:
        """Logits of the sampled rows, and the sequence row of each."""
        rows = decodes + prefills
        sequence_rows, changes = self._rows.assign(rows)
        if changes:
            where = on_device(changes, self._device, torch.int64).unbind(1)
            self._tables[where[0], where[1]] = where[2].int()
        step = host_step(decodes, prefills, sequence_rows, self.pool.block_size)
        step = replace(self.adapters.add_to(step, rows), observed=self._observations.of(rows))
        key = self._graphs.key_of(step)
        if key is None:
            device_step = self._send(step)
            return self._compute(device_step), device_step.sampled_rows
        count = len(step.sampled)
        device_step = self._send(self._graphs.fit(step, key))
        logits = self._graphs.run(key, device_step, self._compute)
        return logits[:count], device_step.sampled_rows[:count]

    def _send(self, step: HostStep) -> DeviceStep:
        shape = self._key_programs, self._model.spec.context, self._processors
        splits = choose_splits(max(1, step.decodes), *shape)
        limits = None
        if step.sequences is not None:
            limits = mix_limits(len(step.tokens), len(step.table_rows), *shape)
        return self._buffer.send(step, self._tables, splits, limits)

    def _sample(self, step: GpuStep) -> None:
        assert step.logits is not None
        logits, of_sequences = step.logits
        step.sampled_rows = [
            each for row in step.rows for each in sampled_rows(row, _first_of(row))
        ]
        self._choose.of_sequences = of_sequences
        choice = self._sampled(step.sampled_rows, logits)
        step.logits = None
        self._copy_to_host(step, choice)

    def _sampled(self, rows: list[Row], logits: Tensor) -> Choice:
        plain = all(self._sampler.is_plain(row) for row in rows)
        any_drawn = not all(is_greedy(row.sampling) for row in rows)
        if plain and not (changes_logits(self._model.spec) and any_drawn):
            return Choice(self._sampler.choose(rows, logits), None, None)
        logits = finish_logits(logits.float(), self._model.spec)
        return self._sampler(rows, logits, self._sampler.begin(rows))

    def _copy_to_host(self, step: GpuStep, choice: Choice) -> None:
        if self._device.type != "cuda":
            step.choice = choice
            return
        top = None if choice.top is None else (_to_host(choice.top[0]), _to_host(choice.top[1]))
        logprobs = None if choice.logprobs is None else _to_host(choice.logprobs)
        step.choice = replace(choice, tokens=_to_host(choice.tokens), logprobs=logprobs, top=top)
        step.done = self._completion_event()

    def _completion_event(self) -> "torch.cuda.Event | None":
        """An event that completes when the device has done all work launched so far."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def _first_of(row: Row) -> int:
    """The id of the row's first token. Where sampling reads it, the history has it by now, unless the
    sequence has ended."""
    if row.tokens[0] != LAST_SAMPLED or row.start >= len(row.history):
        return row.tokens[0]
    return row.history[row.start]


def reserved_bytes(config: EngineConfig, model: LoadedModel) -> int:
    """Memory that steps need in addition to the weights and the pool, measured by the largest step over a
    pool of a few blocks, and by the largest graph, which keeps memory of its own."""
    device = model.device
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    runner = GpuRunner(replace(config, num_blocks=2), model)
    peak = 0
    for tokens in (config.max_batch_tokens, runner.largest_graph):
        torch.cuda.reset_peak_memory_stats(device)
        runner.run_prompts(tokens, config.max_running)
        torch.cuda.synchronize(device)
        peak += torch.cuda.max_memory_allocated(device) - before
    del runner
    torch.cuda.empty_cache()
    peak += OBSERVING_BYTES if config.kv_heavy else 0
    return peak + _SAMPLING_COPIES * config.max_running * model.spec.vocab * 4


def _to_host(tensor: Tensor) -> Tensor:
    """An asynchronous copy to pinned host memory; complete once the stream has executed it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
