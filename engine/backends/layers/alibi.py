"""Attention with linear biases (arXiv 2108.12409): scores fall with the distance of the key."""

from dataclasses import dataclass

import torch

from engine.model_spec import AlibiSpec


@dataclass(frozen=True, slots=True)
class Alibi:
    """slopes: [heads, 1] float32, of a position, as bfloat16 holds them if the biases are `rounded`.
    scale: of the scores, which Falcon's biases have too."""

    slopes: torch.Tensor
    rounded: bool
    scale: float

    def __call__(self, keys: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """What is added to the scores of keys at these positions: [sequences, heads, positions].

        A softmax does not change if all scores of a query do: distances are counted from the sequence's
        newest query for all its queries, which keeps them small.
        """
        if not self.rounded:
            return self.slopes * (keys - newest[:, None]).float()[:, None]
        each = self.slopes.bfloat16() * keys.bfloat16()[:, None]
        return each.float() * self.scale


def alibi(spec: AlibiSpec, scale: float, device: torch.device) -> Alibi:
    slopes = torch.tensor(spec.slopes)[:, None]
    if spec.rounded:
        slopes = slopes.bfloat16().float()
    return Alibi(slopes.to(device), spec.rounded, scale)
