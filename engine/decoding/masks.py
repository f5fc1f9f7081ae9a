"""Sets of ids that a row may sample, as bit masks: one bit for each id, in words of 32."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers.transfer import on_device, send

Mask = NDArray[np.int32]  # [ceil(vocab / 32)]; bit n of word w is id 32 * w + n


def mask_of(ids: Sequence[int], vocab: int) -> Mask:
    """The mask of these ids alone."""
    bits = np.zeros(-(-vocab // 32) * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def exclude_(logits: torch.Tensor, index: list[int], masks: Mask) -> None:
    """Sets the logits of excluded ids of the rows `index` to minus infinity.

    logits: [rows, vocab]; masks: [len(index), words]. Nothing is read from the device.
    """
    vocab = logits.shape[-1]
    excluded = _excluded(masks, logits.device)[:, :vocab]
    if len(index) == len(logits):
        logits.masked_fill_(excluded, float("-inf"))
        return
    where = on_device(index, logits.device)
    logits[where] = logits[where].masked_fill(excluded, float("-inf"))


def _excluded(masks: Mask, device: torch.device) -> torch.Tensor:
    """bool [rows, 32 * words]. A GPU gets the words and widens them itself."""
    if device.type == "cpu":
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits) == 0
    words = send(torch.from_numpy(masks), device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((words[:, :, None] >> shifts) & 1).flatten(1) == 0
