"""Embeddings of prompts: the states after the last layer and its norm, pooled over tokens."""

import numpy as np
import torch

from engine.batch import Row, Sampled


class Pooling:
    """Keeps what chunks of unfinished prompts add, by sequence."""

    def __init__(self) -> None:
        self._parts: dict[int, torch.Tensor] = {}

    def __call__(self, rows: list[Row], states: torch.Tensor | None) -> list[Sampled]:
        """The finished embeddings. `states`: of `Row.pooled_tokens`, in the order of the rows."""
        if states is None:
            return []
        found, at = [], 0
        for row in rows:
            count = len(row.pooled_tokens)
            own = states[at : at + count].double()
            at += count
            if row.sampling.pooling:
                pooled = self._add(row, own)
                found += [_finished(row, pooled)] if row.sample else []
        return found

    def forget(self, seq: int) -> None:
        self._parts.pop(seq, None)

    def _add(self, row: Row, states: torch.Tensor) -> torch.Tensor:
        """The sum of the sequence's states; of `last` and `cls` there is one. A prompt whose
        computation begins again after a preemption begins at its first token."""
        before = self._parts.get(row.seq) if row.start else None
        if before is None:
            before = states.new_zeros(states.shape[1])
        # One after the other, so that chunks do not change the sum.
        total = torch.cat((before[None], states)).cumsum(0)[-1]
        self._parts[row.seq] = total
        return total / row.position if row.sampling.pooling == "mean" else total


def _finished(row: Row, pooled: torch.Tensor) -> Sampled:
    if not torch.isfinite(pooled).all():
        return Sampled(row.seq, [], error="the states of the prompt are not finite")
    return Sampled(row.seq, [], embedding=pooled.numpy().astype(np.dtype("<f4")).tobytes())
