"""Draws of rows that may sample few ids, from the logits of these alone.

Inside names and punctuation, a grammar allows a handful of ids, and most of a draw over the vocabulary
would be about those that it excludes. The shares of ids are whole numbers (`truncation.py`), those of
excluded ids are 0, and the allowed ones keep their order: the same id is drawn.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
import torch

from engine.decoding.masks import Masks
from engine.decoding.truncation import GREEDY_BELOW, draw, excludes_rare
from engine.protocol import SamplingParams

_FEW = 16  # the vocabulary over the number of ids that are few
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(-1, dtype=np.uint8)
_WORTH = 1 << 16  # logits that need not be looked at, in all rows: to list ids takes a time, too


@dataclass(frozen=True, slots=True)
class FewIds:
    """The ids that some rows may sample."""

    rows: list[int]
    ids: torch.Tensor  # int64 [len(rows), most of a row]; rising
    filler: torch.Tensor  # bool, of the same shape: beyond the last id of a row

    def drawn(
        self, logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]
    ) -> tuple[list[int], torch.Tensor]:
        """Which of the rows can be drawn here, and the id of each. logits: [rows, vocab], without
        excluded ones; params and uniforms: of each row."""
        chosen = [k for k, n in enumerate(self.rows) if _is_exact(params[n])]
        rows, ids, filler = [self.rows[k] for k in chosen], self.ids, self.filler
        if not rows:
            return [], ids.new_empty(0)
        if len(rows) < len(self.rows):
            ids, filler = ids[chosen], filler[chosen]
        values = logits[torch.tensor(rows)[:, None], ids].masked_fill_(filler, -inf)
        place = draw(values, [params[n] for n in rows], [uniforms[n] for n in rows])
        return rows, ids.gather(-1, place[:, None])[:, 0]


def few_ids(masks: Masks, index: list[int], vocab: int) -> FewIds | None:
    """Those of the rows `index`, which the masks belong to, that allow few; None if to list them is
    not worth it."""
    if len(index) * vocab < _WORTH:
        return None
    counts = _BITS[masks.view(np.uint8)].sum(-1, dtype=np.int64)
    few = np.flatnonzero((counts > 0) & (counts <= vocab // _FEW))
    if not few.size or len(few) * vocab < _WORTH:
        return None
    counts, words = counts[few], masks[few]
    some = np.flatnonzero(words)  # words with ids, of one row after the other
    bits = np.unpackbits(words.ravel()[some].view(np.uint8), bitorder="little")
    at = np.flatnonzero(bits)
    found = (some % masks.shape[1])[at >> 5] * 32 + (at & 31)
    place = np.arange(counts.max())
    listed = place < counts[:, None]
    ids = np.zeros(listed.shape, np.int64)
    ids[listed] = found
    return FewIds(
        [index[n] for n in few.tolist()], torch.from_numpy(ids), torch.from_numpy(~listed)
    )


def _is_exact(params: SamplingParams) -> bool:
    """Whether a token is drawn, and no sum over the vocabulary but that of shares decides which."""
    return params.temperature >= GREEDY_BELOW and not excludes_rare(params)
