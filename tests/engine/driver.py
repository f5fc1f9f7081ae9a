"""Drives a runner by hand: sequences with their own blocks, steps of any composition."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.backends.layers.step import order_rows
from engine.batch import AdapterHandle, Row, Sampled, StepBatch
from engine.config import EngineConfig
from engine.protocol import SamplingParams
from engine.runners.cpu.runner import CpuRunner, load_runner

BLOCK = 16


def greedy(count: int = 16, **changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": count, "temperature": 0.0} | changes))  # type: ignore[arg-type]


@dataclass
class Sequence:
    number: int
    history: list[int]
    prompt_len: int
    sampling: SamplingParams
    adapter: AdapterHandle | None = None
    choice: int = 0
    done: int = 0  # positions whose KV is present
    blocks: list[int] = field(default_factory=list)
    samples: list[Sampled] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.history[self.prompt_len :]


class Driver:
    """Blocks are handed out in a scattered order, so that nothing works by being contiguous."""

    def __init__(self, checkpoint: Path, blocks: int = 96, **settings: object) -> None:
        fields = {"model": str(checkpoint), "num_blocks": blocks, "threads": 1} | settings
        self.runner: CpuRunner = load_runner(EngineConfig(**fields))  # type: ignore[arg-type]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self.free: list[int] = order
        self._count = 0
        self._generation = 0

    def sequence(
        self,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        adapter: AdapterHandle | None = None,
        choice: int = 0,
    ) -> Sequence:
        self._count += 1
        asked = sampling or greedy()
        return Sequence(self._count, list(prompt), len(prompt), asked, adapter, choice)

    def adapter(self, directory: Path, slot: int) -> AdapterHandle:
        state = self.runner.register_adapter(str(directory))
        self._generation += 1
        handle = AdapterHandle(state.digest, slot, self._generation)
        count = self.runner.adapter_blocks(state.digest)
        self.runner.load_adapter(handle, [self.free.pop() for _ in range(count)])
        return handle

    def step(self, *shares: tuple[Sequence, int]) -> None:
        """One step in which each sequence computes that many tokens (0 is all that is left)."""
        rows = [self._row(sequence, count) for sequence, count in shares]
        found = self.runner.collect(self.runner.launch(StepBatch(rows)))
        by_number = {sample.seq: sample for sample in found}
        for (sequence, _), row in zip(shares, rows, strict=True):
            sequence.done += len(row.tokens)
            if row.sample:
                sample = by_number[sequence.number]
                sequence.history += sample.tokens
                sequence.samples.append(sample)

    def run(self, sequences: list[Sequence], chunk: int = 0, count: int = 16) -> None:
        """All together until each has `count` outputs; prompts go in chunks of `chunk` tokens."""
        while waiting := [s for s in sequences if len(s.output) < count]:
            self.step(*((s, chunk) for s in waiting))

    def finish(self, sequence: Sequence) -> None:
        self.free += sequence.blocks
        self.runner.forget(sequence.number)

    def _row(self, sequence: Sequence, count: int) -> Row:
        left = sequence.history[sequence.done :]
        tokens = left[:count] if count else left
        end = sequence.done + len(tokens)
        while len(sequence.blocks) * BLOCK < end:
            sequence.blocks.append(self.free.pop())
        return Row(
            seq=sequence.number,
            tokens=tokens,
            start=sequence.done,
            blocks=sequence.blocks,
            adapter=sequence.adapter,
            sample=end == len(sequence.history),
            sampling=sequence.sampling,
            choice=sequence.choice,
            history=sequence.history,
            prompt_len=sequence.prompt_len,
        )


def alone_and_together(
    checkpoint: Path, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Eight greedy tokens after each prompt: each by a runner of its own, and all in one batch."""
    alone = []
    for prompt in prompts:
        driver = Driver(checkpoint, dtype="float32")
        sequence = driver.sequence(prompt)
        driver.run([sequence], count=8)
        alone.append(sequence.output)
    driver = Driver(checkpoint, dtype="float32")
    sequences = [driver.sequence(prompt) for prompt in prompts]
    driver.run(sequences, chunk=5, count=8)
    return alone, [sequence.output for sequence in sequences]


class LogitDriver(Driver):
    """Shows the logits of every computed token."""

    def logits(self, sequence: Sequence, count: int, *others: tuple[Sequence, int]) -> torch.Tensor:
        """Computes `count` tokens of the sequence beside the others: [count, vocab]."""
        runner = self.runner
        rows = [self._row(s, n) for s, n in ((sequence, count), *others)]
        decodes, prefills = order_rows(rows, runner.adapters.sort_key)
        with torch.inference_mode():
            tokens = [token for row in decodes + prefills for token in row.tokens]
            inputs = runner._plan(decodes, prefills, tokens, all_logits=True)
            found, _ = runner._forward(inputs)
        first = 0
        for row in decodes + prefills:
            if row.seq == sequence.number:
                break
            first += len(row.tokens)
        for (other, _), row in zip(((sequence, 0), *others), rows, strict=True):
            other.done += len(row.tokens)
        return found[first : first + count]
