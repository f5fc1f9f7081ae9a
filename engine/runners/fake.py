"""A runner without a model, for tests, demonstrations and simulations.

The next token is a pure function of all ids so far and of the adapter, but it is computed from
the content of the blocks: a wrong block table, cache hit, copy or adapter gives another token.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.adapters.digest import CONFIG, WEIGHTS, adapter_digest, read_config
from engine.batch import LAST_SAMPLED, AdapterHandle, Drafter, ModelWork, Row, Sampled, StepBatch
from engine.cache.parts import Windowed
from engine.config import EngineConfig
from engine.decoding.splitmix import mix
from engine.errors import AdapterError, IntegrityError, RequestError
from engine.model_spec import Sight
from engine.models.tokenizer_file import tokenizer_digest
from engine.protocol import (
    AdapterState,
    EngineInfo,
    Grammar,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
)


def _mix(a: int, b: int) -> int:
    return mix(a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019)


def _seed(digest: str) -> int:
    return int.from_bytes(hashlib.sha256(digest.encode()).digest()[:8], "little")


def _embedding(state: int) -> bytes:
    numbers = [_mix(state, place) % 2000 / 1000 - 1 for place in range(8)]
    return np.array(numbers, dtype="<f4").tobytes()


class FakeRunner:
    """Stores for every position of every block a hash of all tokens up to it and the adapter. Where
    `config.model` is a model, it says that it has that model's tokenizer."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        context_length: int = 4096,
        vocab_size: int = 1000,
        eos: tuple[int, ...] = (0,),
        overlapped: bool = False,
        sight: Sight | None = None,
        windowed: Windowed | None = None,
        blocks_per_rank: float = 0.25,
        pause: Callable[[StepBatch], None] | None = None,
    ) -> None:
        self._config = config
        blocks = config.num_blocks or 1024
        self.overlapped = overlapped
        self.scores_prompts = True
        self.drafter: Drafter | None = None
        self.sight = sight or config.kv_sight_of_all
        self.expert_rows: Mapping[int, Sequence[int]] = {}
        self._blocks_per_rank = blocks_per_rank
        self._pause = pause  # simulates a step's duration: sleeps, or advances a fake clock
        self.windowed = windowed
        numbers = blocks if windowed is None else windowed.numbers
        self._kv = np.zeros((numbers, config.block_size), dtype=np.uint64)
        self._parts = np.zeros((blocks, config.block_size), dtype=np.uint64)
        self.bare_bytes = 8 * config.block_size
        self.block_bytes = self.bare_bytes * (1 if windowed is None else 2)
        if windowed is not None and windowed.page:
            self._parts = self._kv
            self.block_bytes = self.bare_bytes * (1 + windowed.part)
        self.layout = "fake"
        self.work = ModelWork(weight_bytes=0, token_flops=1000, position_bytes=1, position_flops=0)
        self._last: dict[int, int] = {}
        self._host: dict[str, int] = {}  # digest -> rank
        self._file_bytes: dict[str, int] = {}
        self._slots: dict[int, tuple[AdapterHandle, list[int]]] = {}
        context = min(context_length, config.max_context or context_length)
        weights = [_mix(11, position) | 1 for position in range(context + 1)]
        self._weights = np.array(weights, dtype=np.uint64)
        path = Path(config.model)
        self.info = EngineInfo(
            engine_id="",
            model="fake",
            base_digest=hashlib.sha256(b"fake base").hexdigest(),
            context_length=context,
            vocab_size=vocab_size,
            block_size=config.block_size,
            num_blocks=blocks,
            eos_token_ids=eos,
            dtype="uint64",
            max_lora_rank=config.max_lora_rank,
            tokenizer_digest=tokenizer_digest(path if path.exists() else None),
            pooling="last",
        )

    def register_adapter(self, path: str) -> AdapterState:
        rank = read_config(Path(path)).get("r")
        if not isinstance(rank, int) or rank < 1:
            raise AdapterError("invalid_adapter", f"{path}/{CONFIG}: r is {rank!r}: use 1 or more")
        digest = adapter_digest(Path(path))
        self._host[digest] = rank
        self._file_bytes[digest] = (Path(path) / WEIGHTS).stat().st_size
        return AdapterState(digest, "host", rank, 0)

    def drop_adapter(self, digest: str) -> None:
        if any(handle.digest == digest for handle, _ in self._slots.values()):
            raise IntegrityError(f"adapter {digest[:12]} was dropped while it has a slot")
        del self._host[digest], self._file_bytes[digest]

    def adapter_blocks(self, digest: str) -> int:
        return max(1, round(self._host[digest] * self._blocks_per_rank))

    def adapter_host_bytes(self, digest: str) -> int:
        return self._file_bytes[digest]

    def load_adapter(self, handle: AdapterHandle, blocks: list[int]) -> None:
        if handle.slot in self._slots or handle.digest not in self._host:
            raise IntegrityError(f"slot {handle.slot} is in use or its adapter is not registered")
        self._cool()
        if self._parts is self._kv:
            blocks = [*blocks, *(number for block in blocks for number in self._part_of(block))]
        self._kv[blocks] = np.uint64(_seed(handle.digest))
        self._slots[handle.slot] = (handle, list(blocks))

    def unload_adapter(self, handle: AdapterHandle) -> None:
        if self._slots.pop(handle.slot)[0] != handle:
            raise IntegrityError(f"slot {handle.slot} held another adapter")

    def forget(self, seq: int) -> None:
        self._last.pop(seq, None)

    def read_blocks(self, blocks: list[int]) -> Callable[[], list[bytes]]:
        found = [
            self._kv[block].tobytes() + self._parts[self._part_of(block)].tobytes()
            for block in blocks
        ]
        return lambda: found

    def write_blocks(self, blocks: list[int], data: list[bytes]) -> None:
        self._cool()
        for block, each in zip(blocks, data, strict=True):
            values = np.frombuffer(each, np.uint64).reshape(-1, self._config.block_size)
            self._kv[block] = values[0]
            if len(values) > 1:
                self._parts[self._part_of(block)] = values[1:]

    def forced(self, seq: int) -> list[int]:
        return []

    def grammar_ready(self, grammar: Grammar) -> bool:
        return False

    def prepare_grammar(self, grammar: Grammar) -> object:
        raise RequestError(
            "invalid_grammar", f"the {grammar.kind} cannot be served: this engine has no model"
        )

    def launch(self, batch: StepBatch) -> list[Sampled]:
        self._cool()
        if batch.copies:
            sources = [a for a, _ in batch.copies]
            self._kv[[b for _, b in batch.copies]] = self._kv[sources]
        if batch.part_copies:
            sources = [a for a, _ in batch.part_copies]
            self._parts[[b for _, b in batch.part_copies]] = self._parts[sources]
        results = [r for r in map(self._compute, batch.rows) if r is not None]
        if self._pause is not None:
            self._pause(batch)
        return results

    def collect(self, ticket: list[Sampled]) -> list[Sampled]:
        return ticket

    def _compute(self, row: Row) -> Sampled | None:
        tokens = row.tokens
        if tokens[0] == LAST_SAMPLED:
            tokens = [self._last[row.seq], *tokens[1:]]
        end = row.start + len(tokens)
        seed = self._adapter_seed(row.adapter)
        blocks = row.blocks[: -(-end // self._config.block_size)]
        flat = self._kv[blocks].reshape(-1)
        state = int(flat[row.start - 1]) if row.start else seed
        fresh = []
        for token in tokens:
            state = _mix(state ^ seed, token)
            fresh.append(state)
        flat[row.start : end] = np.array(fresh, dtype=np.uint64)
        first = row.start // self._config.block_size
        self._kv[blocks[first:]] = flat.reshape(len(blocks), -1)[first:]
        self._write_parts(row, blocks, flat)
        following = row.history[row.start + 1 : row.start + 1 + row.scored]
        scores = [PromptLogprob(token, -0.5, 1) for token in following] if row.scored else None
        if row.sampling.pooling:
            return Sampled(row.seq, [], embedding=_embedding(state)) if row.sample else None
        if not row.sample:
            return Sampled(row.seq, [], scores=scores) if scores else None
        sampled: list[int] = []
        for place in range(end - row.drafts, end + 1):
            sampled.append(self._token_after(flat[:place], row))
            if place < end and sampled[-1] != tokens[place - row.start]:
                break
        self._last[row.seq] = sampled[-1]
        firsts = flat[:: self._config.block_size].tolist()
        attention = None if row.observed is None else [float(n % 97) for n in firsts]
        logprobs = None
        if row.sampling.logprobs is not None:
            logprobs = [self._logprob(token, row) for token in sampled]
        return Sampled(row.seq, sampled, logprobs, scores=scores, attention=attention)

    def _write_parts(self, row: Row, blocks: list[int], flat: NDArray[np.uint64]) -> None:
        """Writes what layers with a window keep, and checks what they see."""
        if self.windowed is None:
            return
        size = self._config.block_size
        seen = max(0, row.start - self.windowed.sight.window + 1)
        numbers = [self._part_of(block) for block in blocks[seen // size :]]
        if not all(numbers):
            raise IntegrityError(f"sequence {row.seq} sees or writes a block without a part")
        before, at = seen // size * size, seen % size
        for each in zip(*numbers, strict=True):
            parts = self._parts[list(each)].reshape(-1)
            if (parts[at : row.start - before] != flat[seen : row.start]).any():
                raise IntegrityError(f"sequence {row.seq} sees another's part of a block")
            parts[row.start - before :] = flat[row.start :]
            self._parts[list(each)] = parts.reshape(len(each), size)

    def _part_of(self, block: int) -> list[int]:
        return [] if self.windowed is None else self.windowed.part_of(block)

    def _cool(self) -> None:
        """What is listed as cold loses its content."""
        if self.windowed is None:
            return
        for memory, numbers in zip((self._parts, self._kv), self.windowed.cold, strict=True):
            memory[numbers] = 0
            numbers.clear()

    def _token_after(self, flat: NDArray[np.uint64], row: Row) -> int:
        """The token that follows the positions `flat`."""
        place, vocab = len(flat), self.info.vocab_size
        whole = int((flat * self._weights[:place]).sum(dtype=np.uint64))
        token = next_token(whole, place, row.sampling, row.choice, vocab)
        too_short = place - row.prompt_len + 1 < row.sampling.min_tokens
        return (token + 1) % vocab if too_short and token in self.info.eos_token_ids else token

    def _logprob(self, token: int, row: Row) -> TokenLogprob:
        others = [(token + i) % self.info.vocab_size for i in range(row.sampling.logprobs or 0)]
        return TokenLogprob(token, -0.5, tuple((t, -0.5 - i) for i, t in enumerate(others)))

    def _adapter_seed(self, handle: AdapterHandle | None) -> int:
        if handle is None:
            return _seed("")
        held, blocks = self._slots[handle.slot]
        if held != handle:
            raise IntegrityError(f"slot {handle.slot} holds generation {held.generation}")
        seed = _seed(handle.digest)
        if not (self._kv[blocks] == np.uint64(seed)).all():
            raise IntegrityError(f"the blocks of adapter {handle.digest[:12]} were overwritten")
        return seed


def next_token(
    state: int, position: int, sampling: SamplingParams, choice: int, vocab_size: int
) -> int:
    """A greedy token depends on the state and position alone; a sampled one also on the request's
    seed and the choice."""
    if sampling.temperature > 0:
        state = _mix(state, (sampling.seed or 0) * 1000 + choice)
    return _mix(state, position) % vocab_size
