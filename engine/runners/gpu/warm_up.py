"""Steps that no request asked for: they record graphs, compile kernels and measure memory before the
first request. They write no keys and read those of block 0."""

from dataclasses import replace

import numpy as np

from engine.backends.gpu.adapters.lora_chunks import chunk_rows_for
from engine.backends.gpu.step import HostStep, LoraRows
from engine.protocol import SamplingParams
from engine.runners.gpu.cuda_graphs import CHUNK_ROWS, GraphKey

_FEW, _MANY = 40, 272  # tokens on either side of the sizes at which the LoRA kernels change


def padding_step(key: GraphKey) -> HostStep:
    """A step of padding alone, with which a graph is recorded."""
    none = np.zeros(0, np.int32)
    lora = None
    if key.adapters:
        lora = LoraRows(none, none.reshape(0, 3), CHUNK_ROWS, key.max_rank)
    start = np.zeros(1, np.int32)
    return HostStep(none, none, none, none, none, start, none, none, 0, lora)


def prompt_step(
    tokens: int, decodes: int, sampled: int, context: int, max_rank: int = 0
) -> HostStep:
    """A step of `tokens` tokens: sequences of one token, then prompts of at most `context`. Every
    token has an adapter if `max_rank` is above 0, that of the empty slot 0."""
    left = tokens - decodes
    prompts = [min(context, left - first) for first in range(0, left, context)]
    lengths = np.array([1] * decodes + prompts, np.int32)
    cu_q = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    numbers = np.arange(tokens, dtype=np.int32)
    rows = np.zeros(len(lengths), np.int32)
    lora = None
    if max_rank:
        size = chunk_rows_for(tokens)
        chunks = [(0, first, min(size, tokens - first)) for first in range(0, tokens, size)]
        lora = LoraRows(numbers, np.array(chunks, np.int32), size, max_rank)
    wanted = (cu_q[1:] - 1)[-sampled:]
    return HostStep(
        tokens=np.zeros(tokens, np.int32),
        positions=numbers % context,
        slots=np.full(tokens, -1, np.int32),
        table_rows=rows,
        seq_lens=lengths,
        cu_q=cu_q,
        sampled=wanted,
        sampled_rows=np.zeros(len(wanted), np.int32),
        decodes=decodes,
        lora=lora,
    )


def compiling_steps(most_tokens: int, context: int, rank_sizes: list[int]) -> list[HostStep]:
    """Prompt and mixed steps, with and without adapters, that between them launch every variant of
    every kernel that such a step can launch."""
    return [
        _with_lengths(prompt_step(tokens, decodes, 1, context, rank))
        for tokens in (_FEW, _MANY)
        if tokens <= most_tokens
        for decodes in (0, 1)
        for rank in (0, *rank_sizes)
    ] or [prompt_step(most_tokens, 0, 1, context)]


def _with_lengths(step: HostStep) -> HostStep:
    """With DoRA's kernel, which finds no factor in the slot."""
    return step if step.lora is None else replace(step, lora=replace(step.lora, rescaled=True))


def compiling_params() -> list[SamplingParams]:
    """What rows ask for that between them launch every variant of the kernel that samples."""
    return [SamplingParams(max_tokens=1, temperature=each) for each in (0.0, 1.0)]
