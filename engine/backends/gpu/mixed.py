"""Steps with prompt chunks as graphs replay them: how much a graph has room for, and the mix of decoding
sequences and prompt chunks, which kernels read from memory."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Tokens of a graph. Up to 256 a step of a large model reads its weights for longer than it computes, so
# padding adds little time, and LoRA's chunks are those of decoding. Longer steps hide their launches.
_SIZES = (16, 32, 64, 128, 192, 256)
_MOST_CHUNKS = 32  # a program that finds no chunk ends at once, but has held a multiprocessor


class MixLimits(NamedTuple):
    """What no mix of a graph exceeds; its launches of attention are as large."""

    splits: int  # of the keys of a decoding sequence
    programs: int  # decoding sequences times their splits
    combined: int  # decoding sequences whose keys are split
    chunks: int  # prompt chunks


@dataclass(frozen=True, slots=True)
class Mix:
    """Of a step that a graph replays."""

    counts: Tensor  # [3] int32: decoding sequences, all sequences, splits of the former's keys
    limits: MixLimits


def graph_sizes(most_tokens: int) -> list[int]:
    """Tokens of the graphs, if a step has at most `most_tokens`."""
    return [*(size for size in _SIZES if size < most_tokens), min(most_tokens, _SIZES[-1])]


def most_chunks(tokens: int, sequences: int) -> int:
    """The prompt chunks that a graph has room for. A chunk has two tokens or more: a sequence of one
    decodes."""
    return min(tokens // 2, sequences, _MOST_CHUNKS)
