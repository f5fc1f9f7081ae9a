"""The operations of a step on a CPU whose ranks have a part of each layer. A product that all ranks
have a part of is summed; the first rank adds the residual stream to its own."""

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.backends.compiled.group import Group
from engine.backends.cpu.operations import CpuOperations
from engine.backends.cpu.row_operations import RowOperations
from engine.backends.layers.embedding import Embedding
from engine.backends.layers.kv import KvPool
from engine.backends.layers.linear import Linear
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import Site
from engine.backends.layers.step import StepInputs
from engine.errors import RankError
from engine.model_spec import ModelSpec

if TYPE_CHECKING:
    from engine.backends.layers.any_mixture import AnyMixture


@dataclass(frozen=True, slots=True)
class Division:
    """What the ranks of a group have, each and together."""

    vocab: list[range]  # the tokens whose rows of the table and of the head each rank has
    inner: int  # the inner values of a plain MLP that all ranks have together


class ShardedOperations(CpuOperations):
    """`compare`: whether ranks compare the residual stream in each step."""

    def __init__(
        self,
        spec: ModelSpec,
        pool: KvPool,
        step: StepInputs,
        *,
        group: Group,
        division: Division,
        compare: bool,
    ) -> None:
        super().__init__(spec, pool, step)
        self._group = group
        self._vocab = division.vocab
        self._inner_values = division.inner
        self._compare = compare

    def _looked_up(self, table: Embedding, tokens: torch.Tensor) -> torch.Tensor:
        own = self._vocab[self._group.rank]
        absent = (tokens < own.start) | (tokens >= own.stop)
        x = table((tokens - own.start).masked_fill(absent, 0)).clone()
        return self._group.sum_(x.masked_fill_(absent[:, None], 0))

    def add(
        self, site: Site, y: torch.Tensor, x: torch.Tensor, norm: RmsNorm | None
    ) -> torch.Tensor:
        if not x.shape[0]:
            return x
        alone = norm is None and self._group.rank == 0
        part = super().add(site, y, x if alone else torch.zeros_like(x), None)
        total = self._group.sum_(part)
        return total if norm is None else x + norm(total)

    def mix(self, mixture: "AnyMixture", x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        if not x.shape[0]:
            return x
        h = x if norm is None else norm(x)
        part = self._mixed(mixture, h)
        return self._group.sum_(part.add_(x) if self._group.rank == 0 else part)

    def _sparse(self, gate: torch.Tensor, cutoff: float) -> torch.Tensor:
        """Mean and deviation are of the gates of all ranks."""
        wide = gate.float()
        mean = self._group.sum_(wide.sum(-1, keepdim=True)) / self._inner_values
        squares = self._group.sum_((wide - mean).square().sum(-1, keepdim=True))
        deviation = (squares / self._inner_values).sqrt()
        return torch.relu(gate - (mean + deviation * cutoff).to(gate.dtype))

    def logits(self, head: Linear, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        if self._compare:
            self._compared(x)
        found = super().logits(head, x, norm)
        if not found.shape[0]:
            return found
        return self._group.columns(found, [len(each) for each in self._vocab])

    def _compared(self, x: torch.Tensor) -> None:
        """Raises RankError unless all ranks have the same bits."""
        data = x.detach().contiguous().view(torch.uint8).numpy().tobytes()
        found = self._group.exchange((len(x), zlib.crc32(data)))
        different = [rank for rank, each in enumerate(found) if each != found[0]]
        if different:
            why = f"rank {different[0]} has another residual stream than rank 0: the step stops"
            self._group.end(why)
            raise RankError(why)


class ShardedRowOperations(ShardedOperations, RowOperations):
    """The same, of which each row is computed by itself."""
