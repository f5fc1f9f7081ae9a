"""What the first rank tells the others: a step, with rows in full the first time and what is new of them
later, and what adapters are to be read, loaded and unloaded, in the order in which it does so itself."""

import marshal
from collections.abc import Sequence
from typing import Any

from engine.batch import AdapterHandle, Row, StepBatch
from engine.protocol import SamplingParams

STEP, REGISTER, DROP, LOAD, UNLOAD, END = range(6)

Message = tuple[int, Any]  # one of the kinds above, and what it carries


def encode(message: Message) -> bytes:
    return marshal.dumps(message)


def decode(data: bytes) -> Message:
    found: Message = marshal.loads(data)
    return found


def as_fields(handle: AdapterHandle) -> tuple[str, int, int]:
    return handle.digest, handle.slot, handle.generation


def as_handle(fields: tuple[str, int, int]) -> AdapterHandle:
    return AdapterHandle(*fields)


class StepWriter:
    """Writes steps, and remembers what the other ranks know of each sequence: the version and the length
    of its table of blocks."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}
        self._ended: list[int] = []

    def forget(self, seq: int) -> None:
        """The sequence has ended, which the next step says."""
        if self._known.pop(seq, None) is not None:
            self._ended.append(seq)

    def step(self, batch: StepBatch) -> Message:
        ended, self._ended = self._ended, []
        rows = [self._row(row) for row in batch.rows]
        return STEP, (rows, batch.copies, ended)

    def _row(self, row: Row) -> tuple[Any, ...]:
        blocks, version = row.blocks, row.table_version
        known = self._known.get(row.seq)
        self._known[row.seq] = version, len(blocks)
        what = row.seq, row.tokens, row.start, row.sample, row.drafts, row.scored
        if known is None:
            adapter = None if row.adapter is None else as_fields(row.adapter)
            return *what, 0, list(blocks), adapter, row.sampling.pooling
        kept = known[1] if known[0] == version and known[1] <= len(blocks) else 0
        return *what, kept, blocks[kept:]


class StepReader:
    """Makes batches of what `StepWriter` wrote. Rows have what computing needs, nothing of sampling."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}
        self._always: dict[int, tuple[AdapterHandle | None, SamplingParams]] = {}

    def batch(self, carried: Any) -> StepBatch:
        rows, copies, ended = carried
        for seq in ended:
            self._blocks.pop(seq, None)
            self._always.pop(seq, None)
        return StepBatch([self._row(each) for each in rows], [tuple(each) for each in copies])

    def _row(self, written: Sequence[Any]) -> Row:
        seq, tokens, start, sample, drafts, scored, kept, blocks, *first = written
        if first:
            adapter = None if first[0] is None else as_handle(first[0])
            self._always[seq] = adapter, SamplingParams(max_tokens=1, pooling=first[1])
        table = self._blocks.setdefault(seq, [])
        table[kept:] = blocks
        handle, sampling = self._always[seq]
        return Row(
            seq=seq,
            tokens=tokens,
            start=start,
            blocks=table,
            adapter=handle,
            sample=sample,
            sampling=sampling,
            choice=0,
            history=[],
            prompt_len=0,
            drafts=drafts,
            scored=scored,
        )
