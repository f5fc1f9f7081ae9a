"""CUDA graphs of whole steps: recorded once for each size, replayed for every step that fits.

A graph replays launches at fixed addresses, so everything that changes between steps lies in the
step's own buffer or in tables that the kernels read: a row's adapter, the adapter's blocks and its
generation are numbers in memory, never part of the graph. So are, where prompt chunks are mixed with
decoding sequences, how many there are of either.
"""

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_chunks import max_chunks
from engine.backends.gpu.mixed import graph_sizes, most_chunks
from engine.backends.gpu.step import DeviceStep, HostStep, padded

log = logging.getLogger("tollhouse.engine")

CHUNK_ROWS = 16  # rows in a LoRA chunk of a graph
_FEW = 8  # adapters of the smaller graphs with prompt chunks: more empty programs cost time


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The size of a graph; steps of fewer tokens or adapters are padded up to it."""

    tokens: int
    adapters: int  # distinct adapters in the step; 0 is a graph without LoRA kernels
    max_rank: int = 0
    sequences: int = 0  # room for so many with prompt chunks; 0: every sequence decodes
    rescaled: bool = False  # with DoRA: recorded when the first such step runs, not at the start


class Recorded(Protocol):
    def replay(self) -> Tensor:
        """Runs again over the present content of the step's memory; returns the same tensor."""


class StepGraphs:
    """Chooses, records and replays graphs. `record` makes a graph from a function: `CudaGraph` on
    a GPU."""

    def __init__(
        self,
        max_running: int,
        max_tokens: int,
        slots: int,
        record: Callable[[Callable[[], Tensor]], Recorded],
    ) -> None:
        self.sizes = token_sizes(max_running)  # of steps in which every sequence decodes
        self.mixed_sizes = graph_sizes(max_tokens)  # of those with prompt chunks
        self._adapters = sorted({1, *(n for n in (2, 4, 8, 16, 32) if n < slots), max(1, slots)})
        self._mixed_adapters = sorted({min(_FEW, self._adapters[-1]), self._adapters[-1]})
        self._record = record
        self._graphs: dict[GraphKey, tuple[list[tuple[int, int]], Recorded]] = {}

    def key_of(self, step: HostStep) -> GraphKey | None:
        """The smallest graph that can replay this step: None if there is none so large, if nothing is
        sampled, a prompt is observed, or with adapters of experts, of the token table or of the head."""
        lora, adapters, rank = step.lora, 0, 0
        if lora is not None:
            if lora.chunk_rows != CHUNK_ROWS or lora.slots is not None or lora.ends:
                return None
            adapters, rank = len({slot for slot, _, _ in lora.chunks.tolist()}), lora.max_rank
        sampled, sequences = len(step.sampled), len(step.table_rows)
        if not sampled or step.observed:
            return None
        if step.decodes == sequences:
            key = self.key(sequences, adapters, rank)
        else:
            key = self.mixed_key(len(step.tokens), adapters, rank)
            if key is None or max(sequences, sampled) > key.sequences:
                return None
            if sequences - step.decodes > most_chunks(key.tokens, key.sequences):
                return None
        if key is None or lora is None or not lora.rescaled:
            return key
        return replace(key, rescaled=True)

    def key(self, tokens: int, adapters: int, max_rank: int) -> GraphKey | None:
        """The smallest graph that fits so many decoding sequences, or None when none is large enough."""
        if tokens > self.sizes[-1] or adapters > self._adapters[-1]:
            return None
        size = _at_least(tokens, self.sizes)
        if not adapters:
            return GraphKey(size, 0)
        return GraphKey(size, min(_at_least(adapters, self._adapters), size), max_rank)

    def mixed_key(self, tokens: int, adapters: int, max_rank: int) -> GraphKey | None:
        """The same for so many tokens of decoding sequences and prompt chunks."""
        if tokens > self.mixed_sizes[-1] or adapters > self._adapters[-1]:
            return None
        size = _at_least(tokens, self.mixed_sizes)
        room = min(size, self.sizes[-1])
        if not adapters:
            return GraphKey(size, 0, 0, room)
        return GraphKey(size, min(_at_least(adapters, self._mixed_adapters), size), max_rank, room)

    def keys(self, max_ranks: list[int]) -> list[GraphKey]:
        """All graphs, the largest first: later graphs then reuse the first one's memory."""
        found: set[GraphKey | None] = set()
        for kind, sizes, adapters in (
            (self.key, self.sizes, self._adapters),
            (self.mixed_key, self.mixed_sizes, self._mixed_adapters),
        ):
            counts = [(0, 0), *((n, rank) for n in adapters for rank in max_ranks)]
            found |= {kind(size, min(n, size), rank) for size in sizes for n, rank in counts}
        return sorted(
            (key for key in found if key is not None),
            key=lambda key: (-key.tokens, key.sequences, key.adapters, key.max_rank),
        )

    def fit(self, step: HostStep, key: GraphKey) -> HostStep:
        chunks = max_chunks(key.tokens, key.adapters, CHUNK_ROWS)
        return padded(step, key.tokens, chunks, key.sequences)

    def run(
        self, key: GraphKey, step: DeviceStep, forward: Callable[[DeviceStep], Tensor]
    ) -> Tensor:
        """The output of the padded step; valid until the next step."""
        recorded = self._graphs.get(key)
        if recorded is None:
            log.debug("recording a graph for %s", key)
            recorded = self._graphs[key] = step.memory, self._record(lambda: forward(step))
        elif recorded[0] != step.memory:
            raise RuntimeError(f"the step's memory moved after the graph for {key} was recorded")
        return recorded[1].replay()


def _at_least(count: int, sizes: list[int]) -> int:
    return sizes[bisect.bisect_left(sizes, count)]


def token_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then sizes whose padding stays near an eighth: 16, 24, 32, 40, 48, 64, 80, ..."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + max(8, 1 << max(0, last.bit_length() - 3)))
    return [size for size in sizes if size < most] + [most]


class CudaGraph:
    """A recorded function on the current CUDA device."""

    def __init__(self, function: Callable[[], Tensor], pool: Any = None) -> None:
        """`pool` is memory shared with other graphs, of which only one runs at a time. They must
        all live while it is in use: torch refuses a pool whose last graph was deleted."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # compiles the kernels and lets the libraries allocate their memory
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may pin host memory meanwhile, which a global capture does not allow.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = function()

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._output


class PlainReplay:
    """Replaces a graph where there are none: calls the function again on the same memory."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function

    def replay(self) -> Tensor:
        return self._function()
