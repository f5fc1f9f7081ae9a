"""Whether an adapter's tensors have the base model's shapes, by the header of its file alone. No torch:
gateways check uploads with it."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.adapters.digest import WEIGHTS
from engine.adapters.peft.config import invalid
from engine.adapters.peft.modules import all_modules, inner_modules, layer_modules
from engine.adapters.peft.names import HEAD, TABLE, place_of
from engine.backends.layers.matrices import part_shape
from engine.model_spec import ModelSpec

_RANK = "rank"
Shape = tuple[int | str, ...]


def check_shapes(directory: Path, spec: ModelSpec) -> None:
    """Raises AdapterError naming the tensor, its shape and the one that the base model needs."""
    path, modules, sizes = directory / WEIGHTS, all_modules(spec), _sizes(spec)
    ranks: dict[tuple[int | None, str], int] = {}
    for key, shape in _shapes(path).items():
        layer, module, kind = place_of(path, key, spec, modules)
        width, out = sizes[module]
        needed: Shape = spec.vocab, spec.hidden
        match kind:
            case "A":
                needed = _RANK, width
            case "B":
                needed = out, _RANK
            case "magnitude" | "bias":
                needed = (out,)
        if not _fits(shape, needed):
            raise invalid(
                path,
                f"tensor {key} has shape {_written(shape)}, the base model needs {_written(needed)}: "
                "was it trained on another base?",
            )
        if _RANK in needed:
            rank = shape[needed.index(_RANK)]
            if ranks.setdefault((layer, module), rank) != rank:
                raise invalid(
                    path,
                    f"tensor {key} has shape {_written(shape)}, the other half of its product has "
                    f"rank {ranks[layer, module]}: was the file put together from two adapters?",
                )


def _sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(in, out) of every module that an adapter may change."""
    found = {
        module: (part_shape(spec, parts[0])[0], sum(part_shape(spec, part)[1] for part in parts))
        for module, parts in layer_modules(spec).items()
    }
    found |= {module: (width, out) for module, (_, width, out) in inner_modules(spec).items()}
    return found | {TABLE: (spec.vocab, spec.hidden), HEAD: (spec.hidden, spec.vocab)}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise invalid(path, f"it is not a complete safetensors file: {str(error)[:300]}") from None


def _fits(shape: tuple[int, ...], needed: Shape) -> bool:
    return len(shape) == len(needed) and all(
        wanted in (_RANK, size) for size, wanted in zip(shape, needed, strict=True)
    )


def _written(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
