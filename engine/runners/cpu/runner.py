"""The CPU runner, and `load_runner`, which chooses the runner for the configured device."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.backends.compiled.group import Group
from engine.backends.cpu.operations import CpuOperations
from engine.backends.cpu.packed_products import adds_packed
from engine.backends.cpu.row_operations import CompiledRowOperations, RowOperations
from engine.backends.cpu.sharded_operations import (
    Division,
    ShardedOperations,
    ShardedRowOperations,
)
from engine.backends.layers.compiled_tables import compiled_table
from engine.backends.layers.host_memory import collapse_into_huge_pages, keep_freed_memory
from engine.backends.layers.kv import KvPool
from engine.backends.layers.logits import finish_logits
from engine.backends.layers.step import (
    StepInputs,
    StepPlanner,
    clear_unwritten,
    order_rows,
    token_ids,
)
from engine.batch import LAST_SAMPLED, Row, Runner, Sampled, StepBatch
from engine.config import EngineConfig
from engine.decoding.edits import reads_history
from engine.decoding.grammar.matchers import PATIENCE_S
from engine.decoding.grammar.step_masks import Begun
from engine.decoding.pooling import Pooling
from engine.decoding.prompt_scores import host_scores, split_logits, with_scores
from engine.decoding.sampling import host_samples
from engine.errors import ConfigError
from engine.extras import imports_of
from engine.model_spec import ModelSpec
from engine.models.load import LoadedModel, load_model
from engine.models.pooling_files import declared_pooling
from engine.models.shares import shards
from engine.runners.cpu.adapters import CpuAdapters
from engine.runners.cpu.decoded_layers import decoded_layers
from engine.runners.cpu.packed_adapters import PackedAdapters
from engine.runners.model_runner import ModelRunner
from engine.speculation.draft_model import load_draft_model
from engine.speculation.heads import DraftHeads
from engine.speculation.heads_file import find_heads
from engine.speculation.verify import sampled_rows, verified


class CpuRunner(ModelRunner):
    """Implements `engine.batch.Runner`; the work is done when `launch` returns."""

    overlapped = False
    scores_prompts = True

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        super().__init__(config, model)
        spec = model.spec
        self._layers = decoded_layers(spec, model.decoder, self.pool, model.group)
        packed = self._layers is not None or adds_packed(spec, model.dtype)
        if config.batch_invariant:
            packed = self._layers is not None and compiled_table(model.decoder.head) is not None
            packed = packed and model.group is None
            if not packed:  # it rotates and rounds in another way
                self._layers = None
        if model.group is not None:  # they order the rows, which all ranks have in one order
            packed = all(model.group.exchange(packed))
        self._operations = _operations(config, model, packed)
        kind = PackedAdapters if packed else CpuAdapters
        self.adapters: CpuAdapters | PackedAdapters = kind(
            config, spec, model.dtype, self.pool, model.shard
        )
        angles = self._angles(model.dtype)
        self._plan = StepPlanner(self.pool, angles, spec.sights, self.adapters.step)
        self._last: dict[int, int] = {}
        self._pooling = Pooling()
        self.heads: DraftHeads | None = None
        self.info = replace(self.info, pooling=declared_pooling(model.path))
        # A row without its mask is computed again, which an overlapped loop cannot do: its next step
        # is launched by then.
        self._patience_s = None if config.overlap else PATIENCE_S

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> list[Sampled]:
        self._make_ready(batch)
        if not batch.rows:
            return []
        decodes, prefills = order_rows(batch.rows, self.adapters.sort_key)
        rows = decodes + prefills
        verifying = [self._with_last(row) for row in rows if row.sampled_tokens]
        rows_to_sample = [
            each for row in verifying for each in sampled_rows(row, self._first_of(row))
        ]
        tokens = token_ids(rows, lambda n: self._last[rows[n].seq])
        inputs = self._plan(decodes, prefills, tokens)
        begun: Begun | None = None

        def begin() -> None:
            nonlocal begun
            begun = self._sampler.begin(rows_to_sample)

        outputs, operations = self._forward(inputs, begin)
        embeddings = self._pooling(rows, operations.pooled)
        logits, scoring = split_logits(rows, outputs)
        scores = host_scores(scoring)
        if not rows_to_sample:
            return with_scores(embeddings, scores)
        choice = self._sampler(rows_to_sample, logits, begun, self._patience_s)
        found = verified(verifying, host_samples(rows_to_sample, choice))
        sampled = self._sampler.accept(verifying, found)
        if self.heads is not None and operations.states is not None:
            self.heads.observe(verifying, split_logits(rows, operations.states)[0], sampled)
        sampled = [self._with_attention(each) for each in sampled]
        self._last.update((each.seq, each.tokens[-1]) for each in sampled if each.tokens)
        return with_scores(sampled + embeddings, scores)

    @torch.inference_mode()
    def compute(self, batch: StepBatch) -> None:
        """A step of which another rank samples; its rows have no `LAST_SAMPLED`."""
        self._make_ready(batch)
        if batch.rows:
            decodes, prefills = order_rows(batch.rows, self.adapters.sort_key)
            tokens = [token for row in decodes + prefills for token in row.tokens]
            self._forward(self._plan(decodes, prefills, tokens))

    def known(self, batch: StepBatch) -> StepBatch:
        """The batch with ids in place of `LAST_SAMPLED`."""
        if all(row.tokens[0] != LAST_SAMPLED for row in batch.rows):
            return batch
        rows = [
            row
            if row.tokens[0] != LAST_SAMPLED
            else replace(row, tokens=[self._last[row.seq], *row.tokens[1:]])
            for row in map(self._with_last, batch.rows)
        ]
        return replace(batch, rows=rows)

    def _make_ready(self, batch: StepBatch) -> None:
        self.pool.cool()
        if batch.copies:
            self.pool.copy(batch.copies, batch.part_copies)
        if batch.rows:
            clear_unwritten(self.pool, batch.rows)
            if isinstance(self.adapters, CpuAdapters):
                self.adapters.compact(batch.rows)

    def _forward(
        self, inputs: StepInputs, begin: Callable[[], None] = lambda: None
    ) -> tuple[torch.Tensor, CpuOperations]:
        """The logits in float32, [rows, vocab], and the operations that have their states. begin: what
        another thread can do meanwhile."""
        operations, layers = self._operations(self._model.spec, self.pool, inputs), self._layers

        def at_once(x: torch.Tensor) -> torch.Tensor | None:
            # Both threads would wait for the interpreter's lock before; the layers do not need it.
            begin()
            return None if layers is None else layers(inputs, x)

        if layers is None:
            begin()
        logits = self._model.decoder(operations, None if layers is None else at_once).float()
        return finish_logits(logits, self._model.spec), operations

    def _with_attention(self, sampled: Sampled) -> Sampled:
        """With what was observed of its prompt, if anything."""
        sums = self._plan.sums.pop(sampled.seq, None)
        return sampled if sums is None else replace(sampled, attention=sums.tolist())

    def _with_last(self, row: Row) -> Row:
        """The row with its last sampled id in the history, where sampling reads it."""
        if row.tokens[0] != LAST_SAMPLED or not reads_history(row.sampling):
            return row
        return replace(row, history=[*row.history[: row.start], self._last[row.seq]])

    def _first_of(self, row: Row) -> int:
        return self._last[row.seq] if row.tokens[0] == LAST_SAMPLED else row.tokens[0]

    def collect(self, ticket: list[Sampled]) -> list[Sampled]:
        return ticket

    def forget(self, seq: int) -> None:
        self._last.pop(seq, None)
        self._plan.sums.pop(seq, None)
        self._sampler.forget(seq)
        self._pooling.forget(seq)


# In a smaller model a product is done before a second thread has woken up.
_SMALL_MODEL = 64 << 20


def _operations(
    config: EngineConfig, model: LoadedModel, packed: bool
) -> Callable[[ModelSpec, KvPool, StepInputs], CpuOperations]:
    group, shard = model.group, model.shard
    if group is None or shard is None:
        by_row = CompiledRowOperations if packed else RowOperations
        return by_row if config.batch_invariant else CpuOperations
    kind = ShardedRowOperations if config.batch_invariant else ShardedOperations
    vocab = [each.vocab for each in shards(shard.whole, group.size)]
    division = Division(vocab, shard.whole.intermediate)
    return partial(kind, group=group, division=division, compare=config.compare_ranks)


def load_rank(config: EngineConfig, group: Group) -> CpuRunner:
    """One rank's part of the configured model, with its memory. All ranks load at once.

    Raises CheckpointError or ConfigError, whose message says what to change, or RankError.
    """
    cores = max(1, physical_cores() // group.size)
    torch.set_num_threads(config.threads or cores)
    model = load_model(config, group=group)
    if config.threads is None and model.bytes * group.size < _SMALL_MODEL:
        torch.set_num_threads(1)
    return CpuRunner(config, model)


def load_runner(config: EngineConfig) -> Runner:
    """Loads the configured model and allocates its memory.

    Raises CheckpointError or ConfigError, whose message says what to change.
    """
    torch.set_num_threads(config.threads or physical_cores())
    heads = find_heads(config)
    model = load_model(config, None if heads is None else heads.check)
    if config.threads is None and model.bytes < _SMALL_MODEL:
        torch.set_num_threads(1)
    if model.device.type == "cpu":
        keep_freed_memory()
        collapse_into_huge_pages()
        runner = CpuRunner(config, model)
        runner.drafter = load_draft_model(config, model, runner.info)
        if heads is not None:
            runner.drafter = runner.heads = DraftHeads(heads, model)
        return runner
    for name, given in (
        ("draft_model", config.draft_model is not None),
        ("draft_heads", config.draft_heads not in ("auto", "none")),
    ):
        if given:
            raise ConfigError(f"{name} is used on a CPU only: leave it out, or set device to cpu")
    with imports_of("gpu", "A CUDA device"):
        from engine.runners.gpu.runner import GpuRunner

    on_device = GpuRunner(config, model)
    on_device.warm_up()
    return on_device


def physical_cores() -> int:
    """The number of cores that this process may run on; hyper-threads of a core count once."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(path.read_text(encoding="ascii").strip() if path.exists() else str(cpu))
    return max(1, len(cores))
