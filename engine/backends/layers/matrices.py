"""The seven matrices of a decoder layer: their names in checkpoints and adapters, the inputs that
they share, and their shapes."""

from typing import TYPE_CHECKING

from engine.model_spec import ModelSpec

if TYPE_CHECKING:
    import torch

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
    found = {site: parts for site, parts in SITES.items() if not (sparse and site in MLP_SITES)}
    if layer >= spec.cached_layers:
        found["qkv"] = ("q",)
    if spec.latent is not None:
        del found["qkv"], found["o"]
    if "gate_up" in found and not spec.gated:
        found["gate_up"] = ("up",)
    return found


# The matrices of latent attention that adapters may change; "q" and "o" have other shapes than above.
LATENT_PARTS = ("q_a", "q_b", "kv_a", "kv_b")


def latent_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(in, out) of each matrix of latent attention; none without it."""
    latent, hidden = spec.latent, spec.hidden
    if latent is None:
        return {}
    queries = spec.heads * (latent.plain + latent.rotated)
    found = {
        "kv_a": (hidden, latent.latent + latent.rotated),
        "kv_b": (latent.latent, spec.heads * (latent.plain + latent.value)),
        "o": (spec.heads * latent.value, hidden),
    }
    if not latent.query:
        return found | {"q": (hidden, queries)}
    return found | {"q_a": (hidden, latent.query), "q_b": (latent.query, queries)}


def own_name(spec: ModelSpec, name: str) -> str:
    """What the family calls a tensor or module that has this name in Llama's checkpoints."""
    for usual, own in spec.renamed:
        name = name.replace(usual, own)
    return name


def fused_rows(spec: ModelSpec, module: str) -> dict[str, "torch.Tensor"]:
    """The rows of each part of a module of `FUSED`."""
    import torch  # a gateway without it reads the tables above

    widths = {part: part_shape(spec, part)[1] for part in FUSED[module]}
    rows = torch.arange(sum(widths.values()))
    parts = torch.split(rows, list(widths.values()))
    if spec.grouped and "q" in widths:
        heads = rows.view(spec.kv_heads, -1, spec.head_dim)
        parts = heads[:, :-2], heads[:, -2], heads[:, -1]
    return {part: each.flatten() for part, each in zip(widths, parts, strict=True)}


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
