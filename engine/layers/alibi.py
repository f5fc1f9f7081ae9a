"""Attention with linear biases (arXiv 2108.12409): scores fall with the distance of the key."""

import math
from dataclasses import dataclass

import torch

from engine.model_spec import AlibiSpec


@dataclass(frozen=True, slots=True)
class Alibi:
    """slopes: [heads, 1], of a position. scale: of the scores, which Falcon's biases have too."""

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


def alibi(spec: AlibiSpec, scale: float) -> Alibi:
    return Alibi(torch.tensor(spec.slopes)[:, None], spec.rounded, scale)


def halving_slopes(heads: int) -> tuple[float, ...]:
    """As the paper has them: a geometric series down to 2^-8, and for another number of heads than a
    power of two every other slope of the next one."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / whole) for n in range(whole)]
    between = [2 ** (-8 * (n + 1) / (2 * whole)) for n in range(0, 2 * whole, 2)]
    return tuple(slopes + between[: heads - whole])


def mpt_slopes(heads: int, last: float) -> tuple[float, ...]:
    """A geometric series down to 2^-last. For another number of heads than a power of two, those of even
    number of the next one come first, then the others, as many as there are heads."""
    whole: int = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-last * (n + 1) / whole) for n in range(whole)]
    return tuple(slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads])
