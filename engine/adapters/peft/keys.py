"""The tensors of an adapter's file, by the module of the base model that they belong to."""

from collections.abc import Container
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from engine.adapters.peft.config import invalid
from engine.adapters.peft.names import Place, place_of
from engine.model_spec import ModelSpec

Found = dict[str, torch.Tensor]  # by what each is to its module; see `names.place_of`


def read_tensors(
    path: Path, file: bytes, spec: ModelSpec, modules: Container[str]
) -> dict[Place, Found]:
    """Raises AdapterError naming the tensor that belongs to no module of `modules`."""
    try:
        tensors = safetensors.torch.load(file)
    except (SafetensorError, KeyError) as error:
        raise invalid(path, f"it is not a complete safetensors file: {str(error)[:300]}") from None
    found: dict[Place, Found] = {}
    for key, tensor in tensors.items():
        layer, module, kind = place_of(path, key, spec, modules)
        if not tensor.is_floating_point():
            raise invalid(path, f"tensor {key} is {tensor.dtype}: only floats are supported")
        found.setdefault((layer, module), {})[kind] = tensor
    return found
