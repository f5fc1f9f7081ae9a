"""Which experts of a mixture each row uses, and how much of each."""

import torch
import torch.nn.functional as F

from engine.backends.compiled.linear import takes_rows
from engine.backends.compiled.mixture import CompiledRouter, can_route
from engine.model_spec import ExpertsSpec


class Router:
    """In float64: another number of rows adds in another order, which must not change a ranking."""

    def __init__(
        self,
        spec: ExpertsSpec,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
        by_row: bool = False,
        *,
        on_device: bool = False,
    ) -> None:
        """weight: [experts, hidden]. bias: of the scores, [experts]. correction: of what ranks experts
        whose shares are sigmoids, [experts]. by_row: rows are routed one by one, so that the last bit
        of a share stays the same as well. on_device: a GPU's graphs record torch's operations, so all is
        done by those."""
        self._by_row = by_row
        self._spec = spec
        self._weight = weight.double()
        self._bias = None if bias is None else bias.double()
        self._correction = None if correction is None else correction.double()
        self.compiled: CompiledRouter | None = None
        if not on_device and can_route(spec, weight, correction):
            self.compiled = CompiledRouter(spec, self._weight, self._bias)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The share and the number of each row's experts, the highest ranked first: [rows, active]."""
        if self.compiled is not None and takes_rows(x):
            return self.compiled(x)
        if not self._by_row or len(x) < 2:
            return self._route(x)
        shares, chosen = zip(*(self._route(row) for row in x.chunk(len(x))), strict=True)
        return torch.cat(shares), torch.cat(chosen)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._spec
        scores = F.linear(x.double(), self._weight, self._bias)
        likely = torch.sigmoid(scores) if spec.sigmoid else torch.softmax(scores, -1)
        ranked = likely if self._correction is None else likely + self._correction
        if spec.groups > 1:
            ranked = self._of_best_groups(ranked)
        chosen = ranked.float().topk(spec.active, -1)[1]
        shares = likely.float().gather(1, chosen)
        if spec.normed:
            shares = shares / shares.sum(-1, keepdim=True).clamp_(min=1e-20)
        return (shares * spec.factor).to(x.dtype), chosen

    def _of_best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """Less than any score for experts of other groups. A group is as good as its best expert, or
        with sigmoids as its two best together."""
        spec = self._spec
        by_group = ranked.view(len(ranked), spec.groups, -1)
        worth = by_group.topk(2 if spec.sigmoid else 1, -1)[0].sum(-1)
        best = worth.topk(spec.active_groups, -1)[1]
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        return by_group.masked_fill(~kept[:, :, None], float("-inf")).view_as(ranked)
