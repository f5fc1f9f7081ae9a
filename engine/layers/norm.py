"""Root-mean-square norm, by the fused kernel of the device."""

import torch
import torch.nn.functional as F


class RmsNorm:
    """x / rms(x) * weight over the last dimension.

    `unit_offset` multiplies by 1 + weight in full precision, as Gemma was trained.
    """

    def __init__(self, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> None:
        self.weight = weight.float() + 1 if unit_offset else weight
        self.eps = eps
        self._shape = (weight.shape[0],)
        self._widen = unit_offset and weight.dtype != torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._widen:
            return F.rms_norm(x.float(), self._shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self._shape, self.weight, self.eps)
