"""The modules of a decoder layer that adapters may change."""

from engine.backends.layers.matrices import FUSED, MODULES, SITES, latent_shapes
from engine.model_spec import ModelSpec


def all_modules(spec: ModelSpec) -> set[str]:
    return {*layer_modules(spec), *inner_modules(spec)}


def layer_modules(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The parts of each module whose products are summed at the layer's sites, by Llama's names."""
    left_out = set() if spec.gated else {"gate"}
    if spec.latent is not None:
        left_out |= {*SITES["qkv"], *SITES["o"]}
    single = {module: (part,) for part, module in MODULES.items() if part not in left_out}
    return single | {whole: FUSED[whole] for whole in spec.fused}


def inner_modules(spec: ModelSpec) -> dict[str, tuple[str, int, int]]:
    """The modules inside a layer's operations that adapters may change, by their names in the layer:
    the operation's name for them, and (in, out)."""
    return _latent_modules(spec) | _expert_modules(spec)


def _latent_modules(spec: ModelSpec) -> dict[str, tuple[str, int, int]]:
    named = {"kv_a": "kv_a_proj_with_mqa"}
    return {
        f"self_attn.{named.get(part, f'{part}_proj')}": (part, *shape)
        for part, shape in latent_shapes(spec).items()
    }


def _expert_modules(spec: ModelSpec) -> dict[str, tuple[str, int, int]]:
    """None where the checkpoint has all experts of a layer as one tensor: PEFT has no names for them."""
    experts, hidden = spec.experts, spec.hidden
    if experts is None or experts.stacked:
        return {}
    found = {}
    groups = [(f"experts.{n}", experts.names, experts.intermediate) for n in range(experts.count)]
    if experts.shared:
        usual = "gate_proj", "up_proj", "down_proj"
        groups.append((experts.shared_name, usual, experts.shared))
    for name, parts, size in groups:
        own = "shared" if name == experts.shared_name else name
        shapes = ((hidden, size), (hidden, size), (size, hidden))
        for part, stored, shape in zip(("gate", "up", "down"), parts, shapes, strict=True):
            found[f"{experts.module}.{name}.{stored}"] = f"{own}.{part}", *shape
    return found
