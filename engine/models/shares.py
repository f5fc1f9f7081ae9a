"""How tensor parallelism divides a model: which heads, inner values and tokens of the vocabulary each
rank has, and the shape of a rank's part.

Query heads stay with their key heads. A rank has whole key heads, or one key head with some of its query
heads, if there are more ranks than key heads. Where heads do not divide evenly, the MLP makes up for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.errors import ConfigError
from engine.model_spec import ExpertsSpec, ModelSpec

_UNIT = 32  # inner values that the compiled kernels and groups of codes take at once


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part. The ranges are of the whole model's numbers; `spec` is the part's shape, but for
    the vocabulary, which stays the whole."""

    rank: int
    size: int
    whole: ModelSpec
    spec: ModelSpec
    heads: range
    kv_heads: range
    inner: range  # of a plain MLP
    expert_inner: range  # of each expert
    shared_inner: range  # of the expert that all tokens use
    vocab: range
    kv_copies: int  # ranks that have the same key head; 1: each has its own

    @property
    def first(self) -> bool:
        """Whether it adds what is added once: the residual stream, and biases of sums."""
        return self.rank == 0


def shards(spec: ModelSpec, size: int) -> list[Shard]:
    """Of every rank. Raises ConfigError, which names what does not divide and the sizes that would."""
    heads, kv_heads, copies = _heads(spec, size)
    plain = any(spec.experts_of(layer) is None for layer in range(spec.layers))
    inner = _inner(spec, heads, kv_heads, size) if plain else [range(0)] * size
    experts = spec.experts
    of_experts = of_shared = [range(0)] * size
    if experts is not None:
        of_experts = _even("inner values of an expert", experts.intermediate, size)
        if experts.shared:
            of_shared = _even("inner values of the shared expert", experts.shared, size)
    vocab = _even("tokens of the vocabulary", spec.vocab, size)
    return [
        Shard(
            rank,
            size,
            spec,
            _part(
                spec, heads[rank], kv_heads[rank], inner[rank], of_experts[rank], of_shared[rank]
            ),
            heads[rank],
            kv_heads[rank],
            inner[rank],
            of_experts[rank],
            of_shared[rank],
            vocab[rank],
            copies,
        )
        for rank in range(size)
    ]


def check_groups(shard: Shard, quantization: str) -> None:
    """Raises ConfigError unless sums over inputs are cut where groups of codes begin."""
    each = shard.whole.head_dim if shard.whole.latent is None else shard.whole.latent.value
    starts = {
        "attention": shard.heads.start * each,
        "the MLP": shard.inner.start,
        "an expert": shard.expert_inner.start,
        "the shared expert": shard.shared_inner.start,
    }
    for what, start in starts.items():
        if start % _UNIT:
            raise ConfigError(
                f"tp is {shard.size}: the part of {what} that rank {shard.rank} has begins at value "
                f"{start}, within a group of {_UNIT} of {quantization}: use quantization none, or tp 1"
            )


def _part(
    spec: ModelSpec, heads: range, kv_heads: range, inner: range, expert: range, shared: range
) -> ModelSpec:
    experts: ExpertsSpec | None = spec.experts
    if experts is not None:
        experts = replace(experts, intermediate=len(expert), shared=len(shared))
    alibi = spec.alibi
    if alibi is not None:
        alibi = replace(alibi, slopes=alibi.slopes[heads.start : heads.stop])
    return replace(
        spec,
        heads=len(heads),
        kv_heads=len(kv_heads),
        intermediate=len(inner) or spec.intermediate,
        experts=experts,
        alibi=alibi,
    )


def _heads(spec: ModelSpec, size: int) -> tuple[list[range], list[range], int]:
    """Query heads and key heads of each rank, and how many ranks have the same key head."""
    of_each = spec.heads // spec.kv_heads
    if size <= spec.kv_heads:
        kv = list(_cut(spec.kv_heads, size))
        return [range(r.start * of_each, r.stop * of_each) for r in kv], kv, 1
    copies = size // spec.kv_heads
    if size % spec.kv_heads or copies > of_each:
        fitting = [n for n in range(1, spec.heads + 1) if _fits(spec, n)]
        raise ConfigError(
            f"tp is {size}: {spec.heads} query heads on {spec.kv_heads} key heads are not divided among "
            f"so many ranks: use {_listed(fitting)}"
        )
    heads, kv = [], []
    for head in range(spec.kv_heads):
        for part in _cut(of_each, copies):
            heads.append(range(head * of_each + part.start, head * of_each + part.stop))
            kv.append(range(head, head + 1))
    return heads, kv, copies


def _fits(spec: ModelSpec, size: int) -> bool:
    if size <= spec.kv_heads:
        return True
    return size % spec.kv_heads == 0 and size // spec.kv_heads <= spec.heads // spec.kv_heads


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


def _inner(spec: ModelSpec, heads: list[range], kv: list[range], size: int) -> list[range]:
    """The inner values of a plain MLP: fewer for a rank with more heads."""
    matrices = 3 if spec.gated else 2
    attention = [
        2 * spec.head_dim * (len(q) + len(k)) / matrices for q, k in zip(heads, kv, strict=True)
    ]
    unit = _unit(spec.intermediate, size)
    units = spec.intermediate // unit
    if units < size:
        raise ConfigError(
            f"tp is {size}: {spec.intermediate} inner values of the MLP are not divided among so many "
            f"ranks: use {_listed(list(range(1, units + 1)))}"
        )
    each = (sum(attention) + spec.intermediate) / size
    ends, wanted = [0], 0.0
    for rank in range(size):
        wanted += each - attention[rank]
        least, most = ends[-1] + 1, units - (size - rank - 1)
        ends.append(min(max(round(wanted / unit), least), most))
    ends[-1] = units
    return [range(a * unit, b * unit) for a, b in pairwise(ends)]


def _even(what: str, total: int, size: int) -> list[range]:
    unit = _unit(total, size)
    if total // unit < size:
        raise ConfigError(
            f"tp is {size}: {total} {what} are not divided among so many ranks: use at most {total}"
        )
    return [range(r.start * unit, r.stop * unit) for r in _cut(total // unit, size)]


def _unit(total: int, size: int) -> int:
    return _UNIT if total % _UNIT == 0 and total // _UNIT >= size else 1


def _cut(total: int, size: int) -> Iterator[range]:
    """So many neighbouring ranges, the first ones larger by one where it does not come out even."""
    first = 0
    for rank in range(size):
        end = first + total // size + (rank < total % size)
        yield range(first, end)
        first = end
