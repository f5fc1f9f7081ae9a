"""The rows of the token table."""

from typing import Protocol

import torch
import torch.nn.functional as F


class Embedding(Protocol):
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] in the served dtype."""


class DenseEmbedding:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)
