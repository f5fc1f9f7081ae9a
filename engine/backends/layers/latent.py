"""Multi-head latent attention with absorbed projections (arXiv 2405.04434, section 2.1).

A position's key is its latent vector and the rotated part that all heads share; its value is the latent
vector. What would make a head's key of it is multiplied into the query instead, and what would make its
value into the output, so that the cache holds one vector however many heads the model has. Behind the
latent part, the rotated part of the key stands in the value too, where nothing reads it.
"""

import torch

from engine.backends.layers.adapter_extras import InnerChanges
from engine.backends.layers.linear import Linear
from engine.backends.layers.norm import RmsNorm
from engine.model_spec import LatentSpec


class LatentQkv:
    """Implements `Linear`: the queries [heads, latent + rotated] of a row and its key, which is
    its value too, before the rotation."""

    def __init__(
        self,
        spec: LatentSpec,
        queries: list[Linear | RmsNorm],
        keys: Linear,
        norm: RmsNorm,
        absorbed: torch.Tensor,
    ) -> None:
        """queries, keys: of the input; the queries' are used one after the other. norm: of the latent
        vector. absorbed: [heads, plain, latent]."""
        self.spec = spec
        self.queries = queries
        self.keys = keys
        self.norm = norm
        self.absorbed = absorbed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.changed(x, None)

    def changed(self, x: torch.Tensor, changes: InnerChanges | None) -> torch.Tensor:
        """With the adapters of each row."""
        spec, heads = self.spec, len(self.absorbed)
        q, names = x, ("q_a", "", "q_b") if len(self.queries) > 1 else ("q",)
        for name, each in zip(names, self.queries, strict=True):
            y = each(q)
            q = y if changes is None else changes.add_(name, q, y)
        plain, rotated = q.view(len(x), heads, -1).tensor_split((spec.plain,), -1)
        out = x.new_empty(len(x), heads + 1, spec.latent + spec.rotated)
        absorbed = torch.bmm(plain.transpose(0, 1), self.absorbed)
        out[:, :heads, : spec.latent] = absorbed.transpose(0, 1)
        out[:, :heads, spec.latent :] = rotated
        keys = self.keys(x)
        if changes is not None:
            changes.add_("kv_a", x, keys)
            for rows, (a, b) in changes.pairs("kv_b"):
                of_keys = b.view(len(b), heads, -1)[:, :, : spec.plain]
                inner = torch.einsum("nhp,rhp->nhr", plain[rows], of_keys)
                out[rows, :heads, : spec.latent] += inner @ a
        latent, shared = keys.tensor_split((spec.latent,), -1)
        out[:, heads, : spec.latent] = self.norm(latent.contiguous())
        out[:, heads, spec.latent :] = shared
        return out.flatten(1)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).add_(other)


class LatentOutput:
    """Implements `Linear` over the heads' sums of latent vectors."""

    def __init__(self, spec: LatentSpec, absorbed: torch.Tensor, output: Linear) -> None:
        """absorbed: [heads, latent, value]."""
        self.spec = spec
        self.absorbed = absorbed
        self.output = output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self._values(x))

    def changed(
        self, x: torch.Tensor, other: torch.Tensor, changes: InnerChanges | None
    ) -> torch.Tensor:
        """The product plus `other`, with the adapters of each row."""
        values = self._values(x)
        if changes is None:
            return self.output.plus(values, other)
        sums, heads = self._sums(x), len(self.absorbed)
        by_head = values.view(len(x), heads, -1)
        for rows, (a, b) in changes.pairs("kv_b"):
            of_values = b.view(len(b), heads, -1)[:, :, self.spec.plain :]
            by_head[rows] += torch.einsum("nhr,rhv->nhv", sums[rows] @ a.t(), of_values)
        return changes.add_("o", values, self.output.plus(values, other))

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.output.plus(self._values(x), other)

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self._sums(x).transpose(0, 1), self.absorbed).transpose(0, 1).flatten(1)

    def _sums(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, heads, latent]"""
        return x.view(len(x), len(self.absorbed), -1)[:, :, : self.spec.latent]
