"""Quantised blocks as integers with their scales."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """A value is scale * code + minimum: codes int8 [blocks, values], scales and minima float32
    [blocks, groups], each for as many neighbours."""

    codes: Array
    scales: Array
    minima: Array | None = None

    def values(self) -> Array:
        """[blocks, values] in float32."""
        groups = self.codes.reshape(*self.scales.shape, -1)
        scaled: Array = self.scales[:, :, None] * groups
        if self.minima is not None:
            scaled = scaled + self.minima[:, :, None]
        return scaled.reshape(self.codes.shape)
