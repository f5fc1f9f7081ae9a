"""The operations of a step on a CPU, by torch."""

from typing import TYPE_CHECKING

import torch

from engine.backends.compiled.pointwise import is_compiled, place_
from engine.backends.cpu.attention import attend
from engine.backends.layers.adapter_extras import (
    InnerChanges,
    among,
    change_table,
    head_of_rows,
    inner_changes,
    rescaled_sum,
)
from engine.backends.layers.attention_plan import Tile
from engine.backends.layers.embedding import Embedding
from engine.backends.layers.experts import Mixture
from engine.backends.layers.kv import KvPool
from engine.backends.layers.latent import LatentOutput, LatentQkv
from engine.backends.layers.linear import Linear, activate
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import Attention, GatedSite, Site
from engine.backends.layers.rotary import RotaryTables, rotate_
from engine.backends.layers.step import StepInputs
from engine.backends.layers.stream_steps import TorchSteps
from engine.model_spec import ModelSpec

if TYPE_CHECKING:
    from engine.backends.layers.any_mixture import AnyMixture


class CpuOperations:
    """Implements `Operations`. The residual stream is a tensor, [rows, hidden].

    Beyond the last keys and values that are stored, layers are computed only for the sampled rows.
    """

    def __init__(self, spec: ModelSpec, pool: KvPool, step: StepInputs) -> None:
        self._spec = spec
        self._pool = pool
        self._step = step
        self._lora = step.all_rows.lora
        self._angles = step.angles
        # States of pooled tokens, in the order of their rows.
        self.pooled: torch.Tensor | None = None
        self.states: torch.Tensor | None = None  # that the logits are computed from

    def embed(self, table: Embedding, scale: float, norm: RmsNorm | None) -> torch.Tensor:
        x = self._looked_up(table, self._step.tokens)
        if self._lora is not None and self._lora.extras:
            change_table(self._lora.extras, self._step.tokens, x)
        x = x if scale == 1.0 else x * scale
        return x if norm is None else norm(x)

    def _looked_up(self, table: Embedding, tokens: torch.Tensor) -> torch.Tensor:
        return table(tokens)

    def streams(self, x: torch.Tensor) -> TorchSteps:
        return TorchSteps(self, self._step.tokens, x, self._spec.activation)

    def project(self, site: Site, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        spec, h = self._spec, x if norm is None else norm(x)
        if isinstance(site.linear, LatentQkv):
            return site.linear.changed(h, self._inside(site.layer))
        fused = None if self._lora is None else self._lora.product(site, h)
        if fused is not None:
            return fused
        qkv = site.linear(h)
        if self._lora is not None:
            ends = (spec.q_width, spec.q_width + spec.kv_width)
            outputs = qkv.tensor_split(ends, -1) if site.layer < spec.cached_layers else (qkv,)
            self._lora.change_(site.layer, site.name, h, *outputs)
        return qkv

    def attend(
        self, attention: Attention, qkv: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec, step, layer = self._spec, self._step, attention.layer
        if spec.qkv_cap is not None:
            qkv.clamp_(-spec.qkv_cap, spec.qkv_cap)
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        q, kv = heads[:, : spec.heads], heads[:, spec.heads :]
        ends = (spec.q_width, spec.q_width + spec.kv_width)
        if attention.head_norms is not None:
            for part, norm in zip((q, kv[:, : spec.kv_heads]), attention.head_norms, strict=False):
                norm.of_heads_(part)
        if attention.value_norm is not None:
            v = kv[:, spec.kv_heads :]
            v.copy_(attention.value_norm(v))
        if attention.row_norms is not None:
            for part, norm in zip(qkv.tensor_split(ends, -1)[:2], attention.row_norms, strict=True):
                part.copy_(norm(part))
        own = attention.source == layer
        if not (own and self._placed(attention, qkv)):
            if attention.rope is not None:
                self._rotate_(qkv[:, : ends[1]], self._angles[attention.rope])
            if own:
                self._pool.write(layer, step.kv_slots[self._pool.kinds[layer]], kv)
        last = spec.cached_layers - 1  # beyond which no row writes anything that others read
        queries = step.all_rows if layer < last else step.sampled
        if queries is None:
            return qkv[:0, : spec.q_width], x[:0]
        self._lora = queries.lora
        if layer == last:
            if spec.shared_layers:
                self._angles = [each.among(queries.rows, ends[0]) for each in self._angles]
            if queries.rows is not None:
                q, x = q.index_select(0, queries.rows), x.index_select(0, queries.rows)
        return self._attended(q, queries.tiles[attention.shape.sight], attention), x

    def _attended(self, q: torch.Tensor, tiles: list[Tile], attention: Attention) -> torch.Tensor:
        return attend(q, self._pool, tiles, attention)

    def _placed(self, attention: Attention, qkv: torch.Tensor) -> bool:
        """Whether queries and keys were rotated, and keys and values stored, in one call."""
        spec, slots = self._spec, self._pool.slots(attention.layer)
        if slots is None or attention.rope is None or not is_compiled(qkv):
            return False
        angles = self._angles[attention.rope]
        if angles.interleaved or angles.part is not None:
            return False
        heads = spec.heads + spec.kv_heads, spec.heads, spec.cached_heads
        places = self._step.kv_slots[self._pool.kinds[attention.layer]]
        place_(qkv, (angles.cos, angles.sin), slots, places, heads)
        return True

    def _rotate_(self, x: torch.Tensor, angles: RotaryTables) -> None:
        rotate_(x, angles, self._spec.head_dim)

    def gate(self, site: GatedSite, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        activation, linear = self._spec.activation, site.linear
        if not x.shape[0]:
            return x.new_empty((0, self._spec.intermediate))
        h = x if norm is None else norm(x)
        lora = self._lora
        if lora is not None and not lora.changes(site.layer, site.name):
            lora = None
        if lora is None and site.cutoff is None:
            return linear.gated(h, activation)
        if lora is not None and site.cutoff is None:
            fused = lora.product(site, h, activation=activation)
            if fused is not None:
                return fused
        gate, up = linear.halves(h)
        if lora is not None:
            lora.change_(site.layer, site.name, h, gate, up)
        if site.cutoff is not None:
            gate = self._sparse(gate, site.cutoff)
        return activate(gate, activation).mul_(up)

    def _sparse(self, gate: torch.Tensor, cutoff: float) -> torch.Tensor:
        """Gates less than so many standard deviations above their row's mean become 0."""
        deviation, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
        return torch.relu(gate - (mean + deviation * cutoff))

    def widen(self, site: Site, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        if not x.shape[0]:
            return x.new_empty((0, self._spec.intermediate))
        h = x if norm is None else norm(x)
        inner = site.linear(h)
        if self._lora is not None:
            self._lora.change_(site.layer, site.name, h, inner)
        return self._activated(inner)

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        """May be computed in place."""
        return activate(x, self._spec.activation)

    def add(
        self, site: Site, y: torch.Tensor, x: torch.Tensor, norm: RmsNorm | None
    ) -> torch.Tensor:
        if not x.shape[0]:
            return x
        if norm is not None:
            out = site.linear(y)
            if self._lora is not None:
                self._lora.change_(site.layer, site.name, y, out)
            return x + norm(out)
        if isinstance(site.linear, LatentOutput):
            return site.linear.changed(y, x, self._inside(site.layer))
        if self._lora is None:
            return site.linear.plus(y, x)
        fused = self._lora.product(site, y, x)
        if fused is not None:
            return fused
        changed = list(self._lora.rescales(site.layer, site.name))
        out = rescaled_sum(site.linear, y, x, changed) if changed else site.linear.plus(y, x)
        self._lora.add_(site.layer, site.name, y, out)
        return out

    def mix(self, mixture: "AnyMixture", x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        if not x.shape[0]:
            return x
        return self._mixed(mixture, x if norm is None else norm(x)).add_(x)

    def _mixed(self, mixture: "AnyMixture", h: torch.Tensor) -> torch.Tensor:
        assert isinstance(mixture, Mixture)
        return mixture(h, self._spec.activation, self._inside(mixture.layer))

    def _inside(self, layer: int) -> InnerChanges | None:
        return None if self._lora is None else inner_changes(self._lora.extras, layer)

    def logits(self, head: Linear, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        extras = self._lora.extras if self._lora is not None else []
        if self._step.pooled is not None:
            pooled, sampled = self._step.pooled
            self.pooled = norm(x.index_select(0, pooled))
            x, extras = x.index_select(0, sampled), among(extras, sampled)
        if not x.shape[0]:
            return x.new_empty((0, self._spec.vocab))
        self.states = h = norm(x)
        return head_of_rows(extras, head, h) if extras else head(h)
