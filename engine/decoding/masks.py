"""Sets of ids that a row may sample, as bit masks: one bit for each id, in words of 32."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.compiled.linear import compiled, has_kernel
from engine.backends.layers.transfer import on_device, send

Mask = NDArray[np.int32]  # [ceil(vocab / 32)]; bit n of word w is id 32 * w + n
Masks = NDArray[np.int32]  # [rows, ceil(vocab / 32)]


def mask_of(ids: Sequence[int], vocab: int) -> Mask:
    """The mask of these ids alone."""
    bits = np.zeros(-(-vocab // 32) * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def exclude_(logits: torch.Tensor, index: list[int], masks: Masks) -> None:
    """Sets the logits of excluded ids of the rows `index` to minus infinity. One that is not a number
    or infinite becomes not a number.

    logits: [rows, vocab]; masks: [len(index), words]. Nothing is read from the device.
    """
    vocab = logits.shape[-1]
    if logits.device.type == "cpu" and has_kernel() and logits.dtype is torch.float32:
        masks, rows = np.ascontiguousarray(masks), np.array(index, np.int64)
        compiled().exclude(
            logits.data_ptr(), logits.stride(0), vocab, masks.ctypes.data, masks.shape[1],
            rows.ctypes.data, len(rows),
        )  # fmt: skip
        return
    amounts = _amounts(masks, logits.device)[:, :vocab]
    if len(index) == len(logits):
        logits.add_(amounts)
        return
    logits.index_add_(0, on_device(index, logits.device), amounts)


@cache
def _by_byte() -> torch.Tensor:
    """[256, 8]: 0 for each bit that is set in the byte, otherwise minus infinity."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(bits).float().log()


def _amounts(masks: Masks, device: torch.device) -> torch.Tensor:
    """float32 [rows, 32 * words]: 0 or minus infinity. A GPU gets the words and widens them itself."""
    if device.type == "cpu":
        # Eight ids a step: a comparison of single bits takes eight times as long.
        octets = torch.from_numpy(masks.view(np.uint8).reshape(-1).astype(np.int32))
        return _by_byte().index_select(0, octets).view(len(masks), -1)
    words = send(torch.from_numpy(masks), device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((words[:, :, None] >> shifts) & 1).flatten(1).float().log()
