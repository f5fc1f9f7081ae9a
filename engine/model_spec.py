"""The shape of a model, as each family's file makes it of `config.json`."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `kind` is default, linear, dynamic, yarn, llama3, longrope or divided (each
    frequency by a number of its own, as GGUF files have it); `values` its numbers."""

    theta: float
    kind: str
    values: dict[str, Any]
    rotated: int | None = None  # values of a head, its first ones; None: all


class Sight(NamedTuple):
    """The positions that a query sees: the last `window`, its own included (0: all), and the first
    `first` whatever the window."""

    window: int = 0
    first: int = 0

    @property
    def most(self) -> int:
        """Positions seen at once; 0: there is no limit."""
        return self.window and self.window + self.first

    def unread_blocks(self, position: int, block_size: int) -> range:
        """The blocks that no query from `position` on sees."""
        start = -(-self.first // block_size)
        past = max(0, position - self.window + 1) // block_size if self.window else 0
        return range(start, max(start, past))


_ALL = Sight()


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters of a layer's attention."""

    scale: float
    window: int = 0  # visible keys, the query's own included; 0: all
    softcap: float = 0.0  # of the scores; 0: off
    first: int = 0  # keys of the sequence's beginning that are visible whatever the window

    @property
    def sight(self) -> Sight:
        return Sight(self.window, self.first)


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """Scores fall with the distance of the key (arXiv 2108.12409): of each query head, by how much for
    a position. `rounded`: key positions and their products are rounded to bfloat16, as Falcon's are."""

    slopes: tuple[float, ...]
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are products of one small vector
    of each position; all heads share a rotated part of the key. All in values."""

    latent: int
    rotated: int
    plain: int  # of a head's key, without the rotated part
    value: int  # of a head
    query: int  # the vector that queries are products of; 0: they are products of the input


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The mixtures of experts that stand for the MLP of some layers."""

    count: int
    active: int  # that a token uses
    intermediate: int
    layers: frozenset[int]
    normed: bool = True  # the shares of a token's experts add up to 1
    sigmoid: bool = (
        False  # shares are sigmoids, and experts chosen by them plus a stored correction
    )
    groups: int = 1  # of neighbouring experts, of which a token uses the best `active_groups` alone
    active_groups: int = 1
    factor: float = 1.0  # of the shares
    shared: int = 0  # the inner size of an expert that all tokens use; 0: there is none
    shared_name: str = "shared_expert"
    shared_gate: bool = True  # a gate says how much of it each token uses
    module: str = "mlp"  # its name in the layer
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert's matrices
    router: str = "gate"  # its name in the folder of the experts
    stacked: bool = (
        False  # the checkpoint holds all experts of a layer as one tensor, as gpt-oss does
    )
    clamp: tuple[float, float] | None = None  # of `layers.experts.ClampedMlp`: alpha and limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Several residual streams, of which a layer reads one, and inputs of each layer's own
    (`engine.models.streams`)."""

    count: int
    active: int  # the number of the one that layers read
    scaled: bool  # it is scaled where the layer's own input is gated by it
    rank: int  # of the low-rank product parallel to attention
    inputs: int  # values of a layer's own input
    vocab: int  # of the table of these inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder's shape. `windows` holds each layer's sliding window in tokens, or None."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    eps: float
    tied: bool
    eos: tuple[int, ...]
    rope: RopeSpec
    local_rope: RopeSpec | None = None  # of layers with a window; None: as the others
    windows: tuple[int | None, ...]
    kv_sight: Sight = _ALL  # of the layers that have no window: the operator's `kv_window`
    activation: str = "silu"
    query_scale: float
    head_norm: bool = False  # RMS norm of each query and key head
    row_norm: bool = False  # RMS norm over all query heads, and over all key heads
    norm_by_head: bool = False  # each head's norm has weights of its own
    layer_norm: bool = False  # norms subtract the mean
    unit_offset_norm: bool = False  # norms multiply by 1 + weight
    parallel: bool = False  # the MLP reads what attention reads, not what it adds to
    norms_before: bool = True  # norms before attention and MLP
    norms_after: bool = False  # norms of the outputs of attention and MLP
    root: str = "model"  # the name of the decoder in the checkpoint
    head: str = "lm_head.weight"
    fused: tuple[str, ...] = ()  # modules of `matrices.FUSED` that the checkpoint holds
    grouped: bool = (
        False  # a fused matrix has, for each key head, its query heads, its key and its value
    )
    renamed: tuple[
        tuple[str, str], ...
    ] = ()  # parts of Llama's names, and the family's own for them
    interleaved: bool = False  # the values of a head are rotated in pairs of neighbours
    unrotated: frozenset[int] = frozenset()  # layers without positions
    embedding_scale: float = 1.0
    rounded_embedding_scale: bool = False  # to the type of the weights, as Gemma was trained
    attention_cap: float | None = None  # soft cap of attention scores
    logit_scale: float = 1.0  # of the logits, before their soft cap
    logit_cap: float | None = None  # soft cap of the logits
    experts: ExpertsSpec | None = None
    gated: bool = True  # the MLP multiplies its inner values by those of a gate
    parallel_norm: bool = False  # with `parallel`: the MLP has a norm of its own
    embedding_norm: bool = False  # a norm of what the token table gives
    alibi: AlibiSpec | None = None
    qkv_cap: float | None = None  # queries, keys and values are cut to within it
    latent: LatentSpec | None = (
        None  # then the one key head is the latent vector and the rotated part
    )
    sinks: bool = False  # a learned score in each head's softmax, which belongs to no key
    value_norm: bool = False  # RMS norm of each value head, without weights
    shared_layers: int = 0  # last layers that read keys and values of an earlier one of their kind
    sparsity: tuple[float, ...] = ()  # of each layer: the share of its gates that are 0
    streams: StreamsSpec | None = None

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def cached_heads(self) -> int:
        """Vectors of `head_dim` that the cache holds for a position and layer: keys, then values; a
        latent vector is both."""
        return self.kv_heads * (1 if self.latent is not None else 2)

    @property
    def cached_layers(self) -> int:
        """The first layers, which have keys and values of their own."""
        return self.layers - self.shared_layers

    def source_of(self, layer: int) -> int:
        """The layer whose keys and values it reads: the last with its kind of window that has any."""
        if layer < self.cached_layers:
            return layer
        kinds = [window is None for window in self.windows[: self.cached_layers]]
        return len(kinds) - 1 - kinds[::-1].index(self.windows[layer] is None)

    @property
    def rotary_dim(self) -> int:
        """How many values of a head are rotated: with latent attention its last ones, otherwise its
        first ones."""
        if self.latent is not None:
            return self.latent.rotated
        return self.rope.rotated or self.head_dim

    @property
    def sights(self) -> set[Sight]:
        return {self.attention(layer).sight for layer in range(self.layers)}

    @property
    def sight(self) -> Sight:
        """The positions that any layer sees."""
        sights = self.sights
        if not all(sight.window for sight in sights):
            return Sight()
        return Sight(max(each.window for each in sights), max(each.first for each in sights))

    @property
    def ropes(self) -> list[RopeSpec]:
        return [self.rope] if self.local_rope is None else [self.rope, self.local_rope]

    def rope_of(self, layer: int) -> int | None:
        """The number, in `ropes`, of the layer's rotation; None: it has no positions."""
        if layer in self.unrotated:
            return None
        return int(self.local_rope is not None and self.windows[layer] is not None)

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """None if the layer has a plain MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def attention(self, layer: int) -> AttentionShape:
        window = self.windows[layer]
        sight = self.kv_sight if window is None else Sight(window)
        return AttentionShape(
            self.query_scale, sight.window, self.attention_cap or 0.0, sight.first
        )
