"""A rank's part of a checkpoint. One table says of each kind of tensor along which dimension it is cut,
and of what its parts are; everything else is whole on every rank."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.backends.layers.packed import Codes
from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.shares import Shard
from engine.models.weights import TensorSource

OUTPUTS, INPUTS = 0, 1  # dimensions of a matrix
_ONCE = -1, range(0)  # of a bias of what is summed over ranks: the first rank has it
# Of the tensor: the dimension that is cut, and which of its numbers a rank has.
Cut = tuple[int, Callable[[Shard], range]]


def _times(values: range, each: int) -> range:
    return range(values.start * each, values.stop * each)


def _q(s: Shard) -> range:
    latent = s.whole.latent
    each = s.whole.head_dim if latent is None else latent.plain + latent.rotated
    return _times(s.heads, each)


def _kv(s: Shard) -> range:
    return _times(s.kv_heads, s.whole.head_dim)


def _kv_b(s: Shard) -> range:
    latent = s.whole.latent
    assert latent is not None
    return _times(s.heads, latent.plain + latent.value)


def _o(s: Shard) -> range:
    latent = s.whole.latent
    return _times(s.heads, s.whole.head_dim if latent is None else latent.value)


def _inner(s: Shard) -> range:
    return s.inner


def _of_expert(s: Shard) -> range:
    return s.expert_inner


def _of_shared(s: Shard) -> range:
    return s.shared_inner


# By the name of a matrix in its layer.
MATRICES: dict[str, Cut] = {
    "self_attn.q_proj": (OUTPUTS, _q),
    "self_attn.k_proj": (OUTPUTS, _kv),
    "self_attn.v_proj": (OUTPUTS, _kv),
    "self_attn.q_b_proj": (OUTPUTS, _q),
    "self_attn.kv_b_proj": (OUTPUTS, _kv_b),
    "self_attn.o_proj": (INPUTS, _o),
    "mlp.gate_proj": (OUTPUTS, _inner),
    "mlp.up_proj": (OUTPUTS, _inner),
    "mlp.down_proj": (INPUTS, _inner),
}


def matrices_of(spec: ModelSpec) -> dict[str, Cut]:
    """`MATRICES`, and those of experts, whose number stands as `#`."""
    found, experts = dict(MATRICES), spec.experts
    if spec.latent is None:
        del found["self_attn.kv_b_proj"]
    if experts is not None:
        for names, root, part in (
            (experts.names, "experts.#", _of_expert),
            (("gate_proj", "up_proj", "down_proj"), experts.shared_name, _of_shared),
        ):
            for name, dimension in zip(names, (OUTPUTS, OUTPUTS, INPUTS), strict=True):
                found[f"{experts.module}.{root}.{name}"] = dimension, part
    return found


def vectors_of(spec: ModelSpec) -> dict[str, Callable[[Shard], range]]:
    """Tensors of a layer that have a first dimension to cut, by their whole name there."""
    found: dict[str, Callable[[Shard], range]] = {}
    if spec.sinks:
        found["self_attn.sinks"] = lambda s: s.heads
    if spec.head_norm and spec.norm_by_head:
        found["self_attn.q_norm.weight"] = lambda s: s.heads
        found["self_attn.k_norm.weight"] = lambda s: s.kv_heads
    if spec.row_norm:
        found["self_attn.q_norm.weight"], found["self_attn.k_norm.weight"] = _q, _kv
    return found


class ShardedSource:
    """Implements `engine.models.weights.TensorSource` over a source with Llama's names."""

    def __init__(self, source: TensorSource, shard: Shard) -> None:
        self.path: Path = source.path
        self._source = source
        self._shard = shard
        spec = shard.whole
        self._layer = re.compile(re.escape(spec.root) + r"\.layers\.\d+\.(.*)")
        self._matrices = {
            name: (dimension, part(shard)) for name, (dimension, part) in matrices_of(spec).items()
        }
        self._vectors = {name: part(shard) for name, part in vectors_of(spec).items()}
        self._tables = {f"{spec.root}.embed_tokens.weight", spec.head}

    def __contains__(self, name: str) -> bool:
        if self._cut(name) is _ONCE and not self._shard.first:
            return False
        return name in self._source

    def __len__(self) -> int:
        return len(self._source)

    def place(self, name: str) -> str:
        return self._source.place(name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape, cut = self._source.shape(name), self._cut(name)
        if cut is None or cut is _ONCE:
            return shape
        dimension, part = cut
        if len(shape) <= dimension or shape[dimension] < part.stop:
            return shape  # which is refused, for it is another than the configuration says
        return *shape[:dimension], len(part), *shape[dimension + 1 :]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        cut = self._cut(name)
        tensor = self._source.read(name, dtype)
        if cut is None or cut is _ONCE:
            return tensor
        dimension, part = cut
        return tensor.narrow(dimension, part.start, len(part)).clone()

    @property
    def format(self) -> str:
        return self._source.format

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        found, cut = self._source.codes(name, small_floats), self._cut(name)
        if found is None or cut is None or cut is _ONCE:
            return found
        dimension, part = cut
        if dimension == OUTPUTS:
            return found.rows(torch.arange(part.start, part.stop))
        return self._columns(name, found, part)

    def stored_dtype(self) -> torch.dtype:
        return self._source.stored_dtype()

    def close(self) -> None:
        self._source.close()

    def _columns(self, name: str, codes: Codes, part: range) -> Codes:
        """Inputs of a quantised matrix, which are cut at the borders of its groups."""
        place, group = self._source.place(name), codes.group
        if codes.order is not None:
            raise CheckpointError(
                f"{place} has its inputs in an order of their own (act-order), which is not divided "
                "among ranks: set tp to 1, or quantization to none"
            )
        if part.start % group or (part.stop % group and part.stop != codes.shape[1]):
            raise CheckpointError(
                f"{place} is cut at inputs {part.start} and {part.stop}, and has groups of {group}: "
                "use a tp whose parts are whole groups, or set quantization to none"
            )
        groups = slice(part.start // group, -(-part.stop // group))
        minima = None if codes.minima is None else codes.minima[:, groups].contiguous()
        return replace(
            codes,
            codes=codes.codes[:, part.start : part.stop].contiguous(),
            scales=codes.scales[:, groups].contiguous(),
            minima=minima,
        )

    def _cut(self, name: str) -> tuple[int, range] | None:
        """The dimension and the part of it; `_ONCE`: of the first rank alone; None: whole."""
        if name in self._tables:
            return OUTPUTS, self._shard.vocab
        found = self._layer.fullmatch(name)
        if found is None:
            return None
        rest = found[1]
        if rest in self._vectors:
            return OUTPUTS, self._vectors[rest]
        module, _, kind = re.sub(r"\.experts\.\d+\.", ".experts.#.", rest).rpartition(".")
        cut = self._matrices.get(module)
        if cut is None or kind not in ("weight", "bias"):
            return None
        if kind == "bias" and cut[0] == INPUTS:
            return _ONCE
        return cut
