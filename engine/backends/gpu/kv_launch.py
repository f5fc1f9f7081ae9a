"""The cache of one layer as the kernels take it."""

from dataclasses import dataclass

import torch
from torch import Tensor

# The codes of `kv_codes`, which needs Triton.
KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}


@dataclass(frozen=True, slots=True)
class PagedKv:
    data: Tensor  # [blocks, key heads and then value heads, block size, dim]: floats, or codes
    scales: Tensor  # [blocks, heads, block size] bfloat16 with codes; otherwise any, never read
    kind: int  # one of `kv_codes`


def of_kernels(kv: Tensor, scales: Tensor | None) -> PagedKv:
    """Codes of e4m3 become bytes, because Triton has no such type for an A100. Raises ValueError for
    a layout that the kernels do not read."""
    if kv.stride(3) != 1:
        raise ValueError(f"kv has stride {kv.stride(3)} in its last dimension: it must be 1")
    if scales is None:
        return PagedKv(kv, kv[..., 0], 0)
    if kv.dtype not in KINDS or scales.dtype != torch.bfloat16 or scales.stride(2) != 1:
        raise ValueError(
            f"kv is {kv.dtype} with scales of {scales.dtype} and strides {scales.stride()}: codes are "
            "int8 or float8_e4m3fn, and their scales bfloat16, those of a head side by side"
        )
    data = kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv
    return PagedKv(data, scales, KINDS[kv.dtype])
