"""The common part of the CPU and GPU runners: a loaded model, its KV memory and its adapters."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from engine.adapters.memory import AdapterMemory
from engine.backends.layers.experts import Mixture
from engine.backends.layers.quantised_kv import kv_name, make_pool
from engine.backends.layers.rotary import RotaryTables, rotary_tables
from engine.batch import AdapterHandle, Drafter, model_work
from engine.cache.parts import windowed_layers
from engine.config import EngineConfig
from engine.decoding.grammar.compiler import Compiled
from engine.decoding.grammar.grammars import Grammars
from engine.decoding.sampling import Choose, Sampler
from engine.models.load import LoadedModel
from engine.models.tokenizer_file import tokenizer_digest, tokenizer_json
from engine.protocol import AdapterState, EngineInfo, Grammar
from engine.runners.kv_budget import agreed_blocks, decide_blocks


class ModelRunner:
    """Implements `engine.batch.Runner` except for the step itself."""

    adapters: AdapterMemory[Any]
    drafter: Drafter | None = None
    in_pages = False  # whether parts of blocks take pages from one list, as memory stays allocated

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        reserved: int = 0,
        choose: Choose | None = None,
    ) -> None:
        """`reserved`: bytes of the device's memory that steps need besides the pool. `choose`: tokens
        from logits, in place of torch's operations. Nothing that the runner holds may hold the runner, so
        that its memory is free as soon as nobody else does."""
        spec, dtype, device = model.spec, model.dtype, model.device
        shape = None if model.group is not None else windowed_layers(spec, 1, self.in_pages)
        layers = None if shape is None else shape.memory
        blocks = decide_blocks(config, model, reserved, layers)
        if model.group is not None:
            blocks = agreed_blocks(model.group, model.digest, blocks)
        self._model = model
        self.sight = spec.sight
        self.windowed = None if shape is None else windowed_layers(spec, blocks, self.in_pages)
        self.pool = make_pool(config, spec, blocks, dtype, device, self.windowed)
        self.block_bytes, self.bare_bytes = self.pool.block_bytes, self.pool.bare_bytes
        self.work = model_work(spec, model.bytes, self.block_bytes / config.block_size)
        mixtures = [block.mixture for block in model.decoder.blocks]
        self.expert_rows: Mapping[int, Sequence[int]] = {
            n: each.rows for n, each in enumerate(mixtures) if isinstance(each, Mixture)
        }
        shapes = [
            tuple(each.shape[1:]) for each in (self.pool.data, self.pool.parts) if each.numel()
        ]
        self.layout = f"{device.type} {' '.join(map(str, shapes))} {self.pool.data.dtype}"
        spare = torch.get_num_threads() < len(os.sched_getaffinity(0))
        text = partial(tokenizer_json, model.path)
        lists = device.type == "cpu" and choose is None and not config.batch_invariant
        self.grammars = Grammars(text, spec.vocab, spec.eos, spare=spare, lists=lists)
        self._sampler = Sampler(
            spec.vocab,
            spec.eos,
            device,
            self.grammars.matchers,
            config.batch_invariant,
            choose,
        )
        self.info = EngineInfo(
            engine_id=uuid.uuid4().hex,
            model=model.name,
            base_digest=model.digest,
            context_length=spec.context,
            vocab_size=spec.vocab,
            block_size=config.block_size,
            num_blocks=blocks,
            eos_token_ids=spec.eos,
            dtype=kv_name(config, dtype),
            batch_invariant=config.batch_invariant,
            max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
            tokenizer_digest=tokenizer_digest(model.path),
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

    def read_blocks(self, blocks: list[int]) -> Callable[[], list[bytes]]:
        return self.pool.read(blocks)

    @torch.inference_mode()
    def write_blocks(self, blocks: list[int], data: list[bytes]) -> None:
        self.pool.cool()
        self.pool.fill(blocks, data)

    def grammar_ready(self, grammar: Grammar) -> bool:
        return self.grammars.ready(grammar)

    def prepare_grammar(self, grammar: Grammar) -> Compiled:
        return self.grammars.prepare(grammar)

    def forced(self, seq: int) -> list[int]:
        return self.grammars.matchers.forced(seq)

    def _angles(self, dtype: torch.dtype) -> list[RotaryTables]:
        return rotary_tables(self._model.spec, self._model.native_context, dtype)
