"""What a model weighs, reads and computes, from the fields of its `config.json`.

Every count is of values (parameters, cached values), not of bytes: `Precision` says what they take.
A family that the engine does not serve is read by the usual names of the fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.errors import CheckpointError
from engine.models.config_fields import check_fields

_CONTEXT = 8192  # where a configuration names none


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer's parameters, and what it keeps of a sequence."""

    attention: int  # parameters of its projections
    cached: int  # values that it keeps of a position
    heads: int  # key heads, over which tensor parallelism divides what is cached; 1 with a latent vector
    window: int  # positions that it keeps; 0: all
    state: int  # values that it keeps of a sequence, whatever the length
    scored: int  # multiplications of a query with a key and its value, over all heads
    dense: (
        int  # parameters of the MLP that every token uses, a shared expert's and the router's too
    )
    expert: int  # parameters of one expert; 0: there are none


@dataclass(frozen=True)
class ModelShape:
    name: str
    layers: tuple[LayerShape, ...]
    hidden: int
    query_heads: int
    vocab: int
    tied: bool
    context: int
    experts: int = 0
    active_experts: int = 0  # of a token
    stored: str = ""  # the precision that the checkpoint declares

    @cached_property
    def attention(self) -> int:
        return sum(layer.attention for layer in self.layers)

    @cached_property
    def dense(self) -> int:
        return sum(layer.dense for layer in self.layers)

    @cached_property
    def expert_weights(self) -> int:
        """Parameters of all experts of all layers."""
        return self.experts * sum(layer.expert for layer in self.layers)

    @property
    def head(self) -> int:
        """Parameters of the product that gives the logits."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.head if self.tied else 2 * self.head
        return self.attention + self.dense + self.expert_weights + tables

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with: the table of embeddings is only looked up."""
        share = self.expert_weights * self.active_experts // max(1, self.experts)
        return self.attention + self.dense + share + self.head

    @property
    def is_mixture(self) -> bool:
        return self.expert_weights > 0

    def experts_touched(self, tokens: float) -> float:
        """Of a layer's experts, how many a step of so many tokens reads, chosen evenly:
        E·(1 − (1 − k/E)^tokens)."""
        if not self.experts:
            return 0.0
        missed: float = (1.0 - self.active_experts / self.experts) ** tokens
        return self.experts * (1.0 - missed)

    def cached_values(self, context: float) -> float:
        """Values that a sequence of `context` positions keeps, over all layers."""
        by_window, state = self._kept
        return state + sum(
            each * (min(context, window) if window else context) for window, each in by_window
        )

    @cached_property
    def _kept(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Values of a position by the window of the layers that keep them, and those of states."""
        found: dict[int, int] = {}
        for layer in self.layers:
            found[layer.window] = found.get(layer.window, 0) + layer.cached
        return tuple(found.items()), sum(layer.state for layer in self.layers)

    @cached_property
    def cached_per_token(self) -> int:
        """Values that one more position takes while no window is full."""
        return sum(layer.cached for layer in self.layers)

    @cached_property
    def kv_heads(self) -> int:
        """Over how many ranks of tensor parallelism the cache divides; the rest hold copies."""
        return max((layer.heads for layer in self.layers if layer.cached), default=1)

    def prefill_scores(self, tokens: float) -> float:
        """Multiplications of queries with the keys before them, and with their values, in a prompt."""
        return sum(
            layer.scored * tokens * (min(tokens, 2 * layer.window) if layer.window else tokens) / 2
            for layer in self.layers
        )


def shape_of(raw: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape that a `config.json` describes. Raises CheckpointError, naming the field."""
    check_fields(dict(raw))
    fields = _Fields({**raw, **raw.get("text_config", {})})
    layers = fields.whole("num_hidden_layers", "n_layer", "n_layers")
    hidden = fields.whole("hidden_size", "n_embd", "n_embed", "d_model")
    experts = fields.some("num_local_experts", "n_routed_experts", "num_experts")
    mixer = _mixers(fields, layers, hidden)
    mlps = _mlps(fields, layers, hidden, experts)
    return ModelShape(
        name=name,
        layers=tuple(
            LayerShape(**attention, **mlp) for attention, mlp in zip(mixer, mlps, strict=True)
        ),
        hidden=hidden,
        query_heads=fields.whole("num_attention_heads", "n_head", "n_heads"),
        vocab=fields.whole("vocab_size"),
        tied=bool(fields.raw.get("tie_word_embeddings", False)),
        context=fields.some("max_position_embeddings", "seq_length", "max_seq_len") or _CONTEXT,
        experts=experts,
        active_experts=fields.some("num_experts_per_tok", "num_experts_per_token"),
        stored=_stored(fields.raw),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    raw: Mapping[str, Any]

    def some(self, *names: str) -> int:
        """The first of these fields that is a number above 0, else 0."""
        for name in names:
            value = self.raw.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return 0

    def whole(self, *names: str) -> int:
        found = self.some(*names)
        if not found:
            raise CheckpointError(
                f"config.json: {names[0]} is {self.raw.get(names[0])!r}: a plan needs a whole number "
                "above 0"
            )
        return found


def _mixers(fields: _Fields, layers: int, hidden: int) -> list[dict[str, int]]:
    heads = fields.whole("num_attention_heads", "n_head", "n_heads")
    full = _latent(fields, hidden, heads) if fields.some("kv_lora_rank") else None
    if full is None:
        full = _grouped(fields, hidden, heads)
    kinds = _kinds(fields, layers)
    window = fields.some("sliding_window")
    own = layers - fields.some("num_kv_shared_layers")  # the rest reads an earlier layer's cache
    found = []
    for number, kind in enumerate(kinds):
        if kind == "linear_attention":
            found.append(_linear(fields, hidden))
            continue
        layer = full | {"window": window if kind == "sliding_attention" else 0}
        found.append(layer if number < own else layer | {"cached": 0})
    return found


def _kinds(fields: _Fields, layers: int) -> list[str]:
    named = fields.raw.get("layer_types")
    if isinstance(named, list) and len(named) == layers:
        return [str(each) for each in named]
    every = fields.some("full_attention_interval")
    if every:
        return [
            "full_attention" if (number + 1) % every == 0 else "linear_attention"
            for number in range(layers)
        ]
    pattern = fields.some("sliding_window_pattern")
    if pattern and fields.some("sliding_window"):
        return [
            "full_attention" if (number + 1) % pattern == 0 else "sliding_attention"
            for number in range(layers)
        ]
    everywhere = fields.some("sliding_window") and fields.raw.get("use_sliding_window", True)
    return ["sliding_attention" if everywhere else "full_attention"] * layers


def _grouped(fields: _Fields, hidden: int, heads: int) -> dict[str, int]:
    """Multi-head, grouped-query and multi-query attention."""
    kv_heads = fields.some("num_key_value_heads", "num_kv_heads") or heads
    width = fields.some("head_dim") or hidden // heads
    gate = 2 if fields.raw.get("attn_output_gate") else 1
    return {
        "attention": hidden * width * ((1 + gate) * heads + 2 * kv_heads),
        "cached": 2 * kv_heads * width,
        "heads": kv_heads,
        "state": 0,
        "scored": 2 * heads * width,
    }


def _latent(fields: _Fields, hidden: int, heads: int) -> dict[str, int]:
    """Multi-head latent attention (arXiv 2405.04434): a position keeps one vector for all heads."""
    latent = fields.whole("kv_lora_rank")
    rotated = fields.whole("qk_rope_head_dim")
    plain = fields.whole("qk_nope_head_dim")
    value = fields.whole("v_head_dim")
    queries = fields.some("q_lora_rank")
    made = heads * (plain + rotated)
    attention = hidden * queries + queries * made if queries else hidden * made
    attention += hidden * (latent + rotated) + latent * heads * (plain + value)
    attention += heads * value * hidden
    index = fields.some("index_head_dim")  # of an indexer that chooses the keys (DeepSeek V3.2)
    if index:
        attention += queries * fields.some("index_n_heads") * index + hidden * index
    return {
        "attention": attention,
        "cached": latent + rotated + index,
        "heads": 1,
        "state": 0,
        "scored": heads * (plain + rotated + value),
    }


def _linear(fields: _Fields, hidden: int) -> dict[str, int]:
    """A gated delta network (arXiv 2412.06464): a state for each value head, of any length."""
    keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
    value_heads = fields.whole("linear_num_value_heads")
    width = fields.whole("linear_value_head_dim")
    values = value_heads * width
    state = value_heads * fields.whole("linear_key_head_dim") * width
    return {
        "attention": hidden * (2 * keys + 3 * values),
        "cached": 0,
        "heads": 1,
        "window": 0,
        "state": 2 * state,  # held in float32
        "scored": 0,
    }


def _mlps(fields: _Fields, layers: int, hidden: int, experts: int) -> list[dict[str, int]]:
    inner = fields.some("intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    gates = 2 if fields.raw.get("model_type") in _UNGATED else 3
    plain = {"dense": gates * hidden * inner, "expert": 0}
    if not experts:
        return [plain] * layers
    each = fields.some("moe_intermediate_size") or inner
    shared = fields.some("shared_expert_intermediate_size", "shared_intermediate_size")
    shared = shared or fields.some("n_shared_experts", "num_shared_experts") * each
    mixture = {"dense": 3 * hidden * shared + hidden * experts, "expert": 3 * hidden * each}
    first = fields.some("first_k_dense_replace")
    step = fields.some("decoder_sparse_step") or 1
    named = fields.raw.get("mlp_only_layers") or ()
    return [
        plain if number < first or (number + 1) % step or number in named else mixture
        for number in range(layers)
    ]


_UNGATED = frozenset(
    {"gpt2", "bloom", "mpt", "falcon", "opt", "gptj", "gpt_neox", "phi", "nemotron"}
)


def _stored(raw: Mapping[str, Any]) -> str:
    """The precision of the checkpoint's weights, by the names of `Precision`."""
    declared = raw.get("quantization_config") or {}
    method = str(declared.get("quant_method", "")).lower()
    if not declared:
        return ""
    if method == "mxfp4":
        return "mxfp4"
    if "fp4" in str(declared).lower():
        return "fp4"
    if "fp8" in method or "float" in str(declared).lower():
        return "fp8"
    bits = declared.get("bits") or declared.get("w_bit")
    if bits is None and method == "compressed-tensors":
        bits = 4 if "'num_bits': 4" in str(declared) else 8
    if bits == 4 and "self_attn" in str(declared.get("ignore", "")):
        return "int4-experts"
    return "int4" if bits == 4 else "int8" if bits == 8 else ""
