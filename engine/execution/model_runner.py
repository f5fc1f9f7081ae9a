"""The common part of the CPU and GPU runners: a loaded model, its KV memory and its adapters."""

import uuid
from functools import partial
from typing import Any

import torch

from engine.batch import AdapterHandle
from engine.config import EngineConfig
from engine.decoding.grammar.grammars import Grammars
from engine.decoding.sampling import Sampler
from engine.execution.kv_budget import decide_blocks
from engine.layers.kv import KvPool
from engine.layers.rotary import RotaryTables, rotary_tables
from engine.lora.adapter_memory import AdapterMemory
from engine.models.load import LoadedModel
from engine.models.tokenizer_file import tokenizer_json
from engine.protocol import AdapterState, EngineInfo, Grammar


class ModelRunner:
    """Implements `engine.batch.Runner` except for the step itself."""

    adapters: AdapterMemory[Any]

    def __init__(self, config: EngineConfig, model: LoadedModel, reserved: int = 0) -> None:
        """`reserved`: bytes of the device's memory that steps need beside the pool."""
        spec, dtype, device = model.spec, model.dtype, model.device
        blocks = decide_blocks(config, spec, dtype, device, reserved)
        self._model = model
        self.window = spec.widest_window
        self.pool = KvPool(spec, blocks, config.block_size, dtype, device)
        self.grammars = Grammars(partial(tokenizer_json, model.path), spec.vocab, spec.eos)
        self._sampler = Sampler(spec.vocab, spec.eos, device, self.grammars.matchers)
        self.info = EngineInfo(
            engine_id=uuid.uuid4().hex,
            model=model.name,
            base_digest=model.digest,
            context_length=spec.context,
            vocab_size=spec.vocab,
            block_size=config.block_size,
            num_blocks=blocks,
            eos_token_ids=spec.eos,
            dtype=str(dtype).removeprefix("torch."),
            max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
        )

    def register_adapter(self, path: str) -> AdapterState:
        return self.adapters.register(path)

    def drop_adapter(self, digest: str) -> None:
        self.adapters.drop(digest)

    def adapter_blocks(self, digest: str) -> int:
        return self.adapters.blocks(digest)

    def adapter_host_bytes(self, digest: str) -> int:
        return self.adapters.host_bytes(digest)

    @torch.inference_mode()
    def load_adapter(self, handle: AdapterHandle, blocks: list[int]) -> None:
        self.adapters.load(handle, blocks)

    @torch.inference_mode()
    def unload_adapter(self, handle: AdapterHandle) -> None:
        self.adapters.unload(handle)

    def grammar_ready(self, grammar: Grammar) -> bool:
        return self.grammars.ready(grammar)

    def prepare_grammar(self, grammar: Grammar) -> None:
        self.grammars.prepare(grammar)

    def _angles(self, dtype: torch.dtype) -> RotaryTables:
        spec, native = self._model.spec, self._model.native_context
        return rotary_tables(spec.rope, spec.head_dim, native, spec.context, dtype)
