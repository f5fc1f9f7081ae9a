"""A smaller model of the same tokenizer that guesses the next tokens, on the same CPU.

It has keys and values of its own. Its greedy tokens are guesses like any others: the served model
verifies them, so they change no answer. It runs without adapters.
"""

import time
from dataclasses import dataclass, field, replace

import torch

from engine.backends.cpu.operations import CpuOperations
from engine.backends.layers.kv import KvPool
from engine.backends.layers.rotary import rotary_tables
from engine.backends.layers.step import StepPlanner, clear_unwritten, order_rows, token_ids
from engine.batch import Row
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.load import LoadedModel, load_model
from engine.protocol import EngineInfo, SamplingParams
from engine.speculation.vocabulary import vocabulary_of

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_READ = 256  # tokens of histories that a call computes beyond one for each sequence
_NEW = 0.2  # the weight of a new measurement


@dataclass(slots=True)
class _Drafted:
    """What the draft model knows of a sequence."""

    blocks: list[int] = field(default_factory=list)
    history: int = 0  # leading ids of the history whose keys and values are present
    guesses: list[int] = field(default_factory=list)  # after them, with keys and values too


class DraftModel:
    """Implements `engine.batch.Drafter`."""

    def __init__(self, model: LoadedModel, info: EngineInfo) -> None:
        """info: of the served model. This one has as many blocks, and guesses no id beyond its."""
        spec, dtype = model.spec, model.dtype
        self._model = model
        self._vocab = min(info.vocab_size, spec.vocab)
        self.pool = KvPool(spec, info.num_blocks, info.block_size, dtype, model.device)
        tables = rotary_tables(spec, model.native_context, dtype)
        self._plan = StepPlanner(self.pool, tables, spec.sights, lambda _decodes, _prefills: None)
        self._free = list(range(info.num_blocks))
        self._sequences: dict[int, _Drafted] = {}
        self.step_s = 0.0  # of a step of one token for each sequence, on average

    def forget(self, number: int) -> None:
        known = self._sequences.pop(number, None)
        if known is not None:
            self._free += known.blocks

    @torch.inference_mode()
    def guesses(self, histories: dict[int, list[int]], count: int) -> dict[int, list[int]]:
        """`count` guesses after each history, by the sequence's number. None for one whose history is
        too long for this model, or is still being read."""
        ready = [n for n, history in histories.items() if self._prepare(n, history, count)]
        rows = self._catch_up({number: histories[number] for number in ready})
        if not rows:
            return {}
        found: dict[int, list[int]] = {row.seq: [] for row in rows}
        for _ in range(count):
            short = all(len(row.tokens) <= 2 for row in rows)
            began = time.perf_counter()
            rows = self._step(rows, found)
            if short:
                self._measure(time.perf_counter() - began)
        for number, ids in found.items():
            self._sequences[number].guesses = ids[:-1]
        return found

    def _measure(self, seconds: float) -> None:
        seconds = min(seconds, 4 * self.step_s or seconds)
        self.step_s += _NEW * (seconds - self.step_s) if self.step_s else seconds

    def _prepare(self, number: int, history: list[int], count: int) -> bool:
        """Takes back what proved wrong, and provides blocks. Whether there are enough."""
        known = self._sequences.setdefault(number, _Drafted())
        right = 0
        for guess, token in zip(known.guesses, history[known.history :], strict=False):
            if guess != token:
                break
            right += 1
        known.history = min(known.history + right, len(history) - 1)
        known.guesses = []
        length = len(history) + count
        if length > self._model.spec.context:
            return False
        lacking = -(-length // self.pool.block_size) - len(known.blocks)
        if lacking > len(self._free):
            return False
        known.blocks += [self._free.pop() for _ in range(lacking)]
        return max(history[known.history :]) < self._model.spec.vocab

    def _catch_up(self, histories: dict[int, list[int]]) -> list[Row]:
        """Rows that end with the last id of their history. Where more is to be read than a call may
        compute, a part of it is computed here, without a row."""
        rows, parts, left = [], [], _READ
        for number, history in histories.items():
            known = self._sequences[number]
            start, lacking = known.history, len(history) - known.history
            if lacking > left + 1:
                parts += [self._row(number, history[start : start + left], start)] if left else []
                known.history += left
                left = 0
                continue
            left -= lacking - 1
            rows.append(self._row(number, history[start:], start))
            known.history = len(history)
        if parts:
            self._forward([replace(row, sample=False) for row in parts])
        return rows

    def _row(self, number: int, tokens: list[int], start: int) -> Row:
        blocks = self._sequences[number].blocks
        return Row(number, tokens, start, blocks, None, True, _GREEDY, 0, [], 0)

    def _step(self, rows: list[Row], found: dict[int, list[int]]) -> list[Row]:
        """Adds one guess to each sequence; the rows that come next."""
        ordered, logits = self._forward(rows)
        for row, token in zip(ordered, logits.argmax(-1).tolist(), strict=True):
            found[row.seq].append(token)
        return [self._row(row.seq, found[row.seq][-1:], row.position) for row in ordered]

    def _forward(self, rows: list[Row]) -> tuple[list[Row], torch.Tensor]:
        clear_unwritten(self.pool, rows)
        decodes, prefills = order_rows(rows)
        ordered = decodes + prefills
        inputs = self._plan(decodes, prefills, token_ids(ordered, lambda _row: 0))
        operations = CpuOperations(self._model.spec, self.pool, inputs)
        return ordered, self._model.decoder(operations)[:, : self._vocab]


def load_draft_model(
    config: EngineConfig, served: LoadedModel, info: EngineInfo
) -> DraftModel | None:
    """The configured draft model. Raises ConfigError for one of another tokenizer, CheckpointError
    naming a file at fault."""
    if config.draft_model is None:
        return None
    model = load_model(
        replace(
            config,
            model=config.draft_model,
            max_context=None,
            batch_invariant=False,
            kv_window=None,
        )
    )
    _check_vocabulary(config, served, model)
    return DraftModel(model, info)


def _check_vocabulary(config: EngineConfig, served: LoadedModel, draft: LoadedModel) -> None:
    ours, theirs = vocabulary_of(served.path), vocabulary_of(draft.path)
    if ours is None and theirs is None:  # checkpoints without tokenizers: as many ids must do
        same = served.spec.vocab == draft.spec.vocab
    else:
        same = ours == theirs
    if not same:
        sizes = f"{_size(theirs, draft)} tokens, {config.model} {_size(ours, served)}"
        raise ConfigError(
            f"draft_model {config.draft_model} has another vocabulary than the model ({sizes}): "
            "use a smaller model of the same tokenizer"
        )


def _size(vocabulary: dict[str, int] | None, model: LoadedModel) -> int:
    return model.spec.vocab if vocabulary is None else len(vocabulary)
