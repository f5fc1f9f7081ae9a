"""A rank's part of an adapter, cut as the base's matrices are: where a rank has some of the outputs, B by
outputs; where it has some of the inputs, A by inputs. The other matrix is whole on every rank."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from engine.adapters.files import AdapterWeights
from engine.backends.layers.adapter_extras import AdapterExtras, HeadChange, Pair, Rescale
from engine.backends.layers.matrices import MODULES
from engine.model_spec import ModelSpec
from engine.models.sharded_source import INPUTS, OUTPUTS, Cut, matrices_of
from engine.models.shares import Shard


def part_of_adapter(weights: AdapterWeights, shard: Shard) -> AdapterWeights:
    cuts = _by_part(shard.whole)
    matrices = {
        (layer, part): _pair(pair, cuts.get(part), shard)
        for (layer, part), pair in weights.matrices.items()
    }
    extras = weights.extras
    if extras is not None:
        extras = _extras(extras, shard, cuts)
    return replace(weights, matrices=matrices, extras=extras)


def _by_part(spec: ModelSpec) -> dict[str, Cut]:
    """The cuts of `sharded_source`, by the names that adapters have for the matrices. The number of an
    expert stands as `#`."""
    cuts = matrices_of(spec)
    found = {part: cuts[module] for part, module in MODULES.items()}
    if spec.latent is not None:
        found |= {part: cuts[f"self_attn.{part}_proj"] for part in ("q_b", "kv_b")}
    experts = spec.experts
    if experts is not None:
        for part, name in zip(("gate", "up", "down"), experts.names, strict=True):
            found[f"experts.#.{part}"] = cuts[f"{experts.module}.experts.#.{name}"]
            found[f"shared.{part}"] = cuts[f"{experts.module}.{experts.shared_name}.{part}_proj"]
    return found


def _pair(pair: Pair, cut: Cut | None, shard: Shard) -> Pair:
    """pair: A [rank, in] and B [rank, out]."""
    if cut is None:
        return pair
    (a, b), (dimension, part) = pair, cut
    own = part(shard)
    if dimension == OUTPUTS:
        return a, _columns(b, own)
    return _columns(a, own), b


def _columns(matrix: torch.Tensor, own: range) -> torch.Tensor:
    return matrix[:, own.start : own.stop].contiguous()


def _extras(extras: AdapterExtras, shard: Shard, cuts: dict[str, Cut]) -> AdapterExtras:
    rescales = {
        (layer, part): _rescale(each, cuts.get(part), shard)
        for (layer, part), each in extras.rescales.items()
    }
    pairs = {
        (layer, name): _pair(pair, cuts.get(_numberless(name)), shard)
        for (layer, name), pair in extras.pairs.items()
    }
    head = extras.head
    return replace(
        extras,
        rescales=rescales,
        pairs=pairs,
        head=None if head is None else _head(head, shard),
        bytes=extras.bytes - _bytes(extras.pairs.values()) + _bytes(pairs.values()),
    )


def _bytes(pairs: Iterable[Pair]) -> int:
    return sum(a.nbytes + b.nbytes for a, b in pairs)


def _numberless(name: str) -> str:
    root, _, rest = name.partition(".")
    return f"experts.#.{rest.partition('.')[2]}" if root == "experts" else name


def _rescale(rescale: Rescale, cut: Cut | None, shard: Shard) -> Rescale:
    if cut is None:
        return rescale
    dimension, part = cut
    if dimension == INPUTS:  # each rank's part of the sum has the factor; the shift is added once
        return rescale if shard.first else replace(rescale, shift=None)
    return _of_outputs(rescale, part(shard))


def _of_outputs(rescale: Rescale, own: range) -> Rescale:
    shift = rescale.shift
    return Rescale(
        rescale.factor[own.start : own.stop].contiguous(),
        None if shift is None else shift[own.start : own.stop].contiguous(),
    )


def _head(head: HeadChange, shard: Shard) -> HeadChange:
    own, whole = shard.vocab, head.whole
    if isinstance(whole, torch.Tensor):
        whole = whole[own.start : own.stop].contiguous()
    return HeadChange(
        whole=whole,
        pair=None if head.pair is None else (head.pair[0], _columns(head.pair[1], own)),
        rescale=None if head.rescale is None else _of_outputs(head.rescale, own),
    )
