"""The seven matrices of a decoder layer: their names in checkpoints and adapters, the inputs that
they share, and their shapes."""

from engine.model_spec import ModelSpec

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
PARTS = tuple(MODULES)
# A site is one input that several matrices read; its parts are those matrices.
SITES = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
SITE_OF = {part: site for site, parts in SITES.items() for part in parts}

MLP_SITES = ("gate_up", "down")  # which a layer with a mixture of experts has not

# The names of sites that some checkpoints and adapters store as one matrix, the parts in order.
FUSED = {"self_attn.qkv_proj": SITES["qkv"], "mlp.gate_up_proj": SITES["gate_up"]}


def sites_of(spec: ModelSpec, layer: int) -> dict[str, tuple[str, ...]]:
    """The sites of a layer, to which adapters may add."""
    sparse = spec.experts_of(layer) is not None
    return {site: parts for site, parts in SITES.items() if not (sparse and site in MLP_SITES)}


def part_shape(spec: ModelSpec, part: str) -> tuple[int, int]:
    """(in, out) of a matrix."""
    return {
        "q": (spec.hidden, spec.q_width),
        "k": (spec.hidden, spec.kv_width),
        "v": (spec.hidden, spec.kv_width),
        "o": (spec.q_width, spec.hidden),
        "gate": (spec.hidden, spec.intermediate),
        "up": (spec.hidden, spec.intermediate),
        "down": (spec.intermediate, spec.hidden),
    }[part]
