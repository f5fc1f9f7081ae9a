"""The device side of the engine: a loaded model, its KV memory, its adapters, and one step."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.adapter_host import AdapterHost
from engine.batch import LAST_SAMPLED, AdapterHandle, Row, Runner, Sampled, StepBatch
from engine.config import EngineConfig
from engine.errors import AdapterError, IntegrityError
from engine.layers.host_memory import collapse_into_huge_pages, keep_freed_memory
from engine.layers.kv import KvPool, block_bytes
from engine.layers.lora_slots import LoraSlots
from engine.layers.rotary import rotary_tables
from engine.layers.step import StepPlanner, ordered
from engine.memory import decide_blocks
from engine.models.load import LoadedModel, load_model
from engine.protocol import AdapterState, EngineInfo
from engine.runner_info import engine_info
from engine.sampling import Sampler, host_samples


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step's result; on a CPU nothing is still under way."""

    sampled: list[Sampled]


class CpuRunner:
    """Implements `engine.batch.Runner` with the work done when `launch` returns."""

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        spec, dtype, device = model.spec, model.dtype, model.device
        self._config = config
        self._model = model
        self._blocks = decide_blocks(config, spec, dtype, device)
        self._info = engine_info(config, model, self._blocks)
        self._pool = KvPool(spec, self._blocks, config.block_size, dtype, device)
        self._host = AdapterHost(spec, dtype, config.max_lora_rank)
        self._slots = LoraSlots(spec, config.max_adapter_slots, dtype)
        tables = rotary_tables(spec.rope, spec.head_dim, model.native_context, spec.context, dtype)
        windows = {spec.attention(layer).window for layer in range(spec.layers)}
        self._plan = StepPlanner(self._pool, tables, windows, self._slots.step)
        self._sampler = Sampler(spec.vocab, spec.eos, device)
        self._last: dict[int, int] = {}

    @property
    def num_blocks(self) -> int:
        return self._blocks

    @property
    def overlapped(self) -> bool:
        return False

    def info(self) -> EngineInfo:
        return self._info

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> Step:
        if batch.copies:
            self._pool.copy(batch.copies)
        if not batch.rows:
            return Step([])
        self._slots.gather(batch.rows)
        decodes, prefills = ordered(batch.rows, self._slots.place)
        rows = decodes + prefills
        inputs = self._plan(decodes, prefills, self._tokens(rows))
        logits = self._model.decoder(inputs, self._pool)
        asking = [row for row in rows if row.sample]
        if not asking:
            return Step([])
        sampled = host_samples(asking, self._sampler(asking, logits))
        self._last.update((sample.seq, sample.token) for sample in sampled)
        return Step(sampled)

    def collect(self, ticket: Step) -> list[Sampled]:
        return ticket.sampled

    def register_adapter(self, path: str) -> AdapterState:
        if not self._config.enable_lora:
            raise AdapterError("lora_disabled", "this engine was started with LoRA disabled")
        weights = self._host.register(Path(path))
        return AdapterState(weights.digest, "host", weights.rank, 0)

    def drop_adapter(self, digest: str) -> None:
        self._host.drop(digest)

    def adapter_blocks(self, digest: str) -> int:
        spec, dtype = self._model.spec, self._model.dtype
        needed = self._slots.bytes(self._host.rank(digest))
        return -(-needed // block_bytes(spec, self._config.block_size, dtype))

    def load_adapter(self, handle: AdapterHandle, blocks: list[int]) -> None:
        if len(blocks) < self.adapter_blocks(handle.digest):
            raise IntegrityError(f"adapter {handle.digest[:12]} was given {len(blocks)} blocks")
        weights = self._host.weights(handle.digest)
        self._pool.lend(blocks)
        self._slots.load(handle, weights)

    def unload_adapter(self, handle: AdapterHandle) -> None:
        self._slots.unload(handle)

    def forget(self, seq: int) -> None:
        self._last.pop(seq, None)
        self._sampler.forget(seq)

    def _tokens(self, rows: list[Row]) -> list[int]:
        tokens = [token for row in rows for token in row.tokens]
        if LAST_SAMPLED in tokens:
            owners = [row.seq for row in rows for _ in row.tokens]
            tokens = [
                self._last[seq] if token == LAST_SAMPLED else token
                for seq, token in zip(owners, tokens, strict=True)
            ]
        return tokens


# A model of fewer bytes is done with a product before a second thread has woken up.
_SMALL_MODEL = 64 << 20


def load_runner(config: EngineConfig) -> Runner:
    """Loads the model that the configuration names and takes its memory.

    Raises CheckpointError or ConfigError, each naming what to change.
    """
    torch.set_num_threads(config.threads or physical_cores())
    model = load_model(config)
    if config.threads is None and model.bytes < _SMALL_MODEL:
        torch.set_num_threads(1)
    if model.device.type == "cpu":
        keep_freed_memory()
        collapse_into_huge_pages()
        return CpuRunner(config, model)
    from engine.runner_gpu import GpuRunner  # needs Triton, which not every machine has

    runner = GpuRunner(config, model)
    runner.warm_up()
    return runner


def physical_cores() -> int:
    """Cores that this process may run on, hyper-threads counted once."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(path.read_text(encoding="ascii").strip() if path.exists() else str(cpu))
    return max(1, len(cores))
