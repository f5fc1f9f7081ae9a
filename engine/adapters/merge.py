"""Writes a checkpoint whose weights have an adapter's changes in them."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from engine.adapters.digest import CONFIG, WEIGHTS, read_config
from engine.adapters.files import read_adapter
from engine.adapters.peft.config import scale_of
from engine.adapters.peft.keys import Found, read_tensors
from engine.adapters.peft.modules import all_modules
from engine.adapters.peft.names import HEAD, TABLE
from engine.backends.layers.matrices import own_name
from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.base_weights import BaseWeights
from engine.models.formats.safetensors_source import SafetensorsSource
from engine.models.registry import model_spec
from engine.models.registry import read_config as read_model_config
from engine.models.tied_head import head_is_table
from engine.models.write_checkpoint import check_paths, write_beside, write_tensors

_MOST_RANK = 1 << 16


def write_merged(source: Path, adapter: Path, target: Path) -> int:
    """The bytes written. source: a checkpoint in Hugging Face layout, in floats; adapter: a PEFT
    directory. Weights keep the types that they are stored in; where the adapter changes the token
    table or the head of a model that shares them, both are written. Raises CheckpointError,
    ConfigError or AdapterError."""
    check_paths(source, target)
    config = read_model_config(source)
    if config.get("quantization_config"):
        raise CheckpointError(f"{source} is quantised: merge into the checkpoint in floats")
    spec = model_spec(config)
    read_adapter(adapter, BaseWeights(str(source), spec), torch.float32, _MOST_RANK)
    path = adapter / WEIGHTS
    found = read_tensors(path, path.read_bytes(), spec, all_modules(spec))
    with closing(SafetensorsSource(source)) as tensors:
        merged = _Merged(spec, tensors, read_config(adapter), adapter / CONFIG)
        written = write_tensors(merged.tensors(found), target)
    for part in (config, config.get("text_config")):
        if merged.untied and isinstance(part, dict):
            part["tie_word_embeddings"] = False
    write_beside(source, target, config)
    return written


class _Merged:
    def __init__(
        self, spec: ModelSpec, tensors: SafetensorsSource, config: dict[str, Any], path: Path
    ) -> None:
        self.untied = False
        self._spec = spec
        self._tensors = tensors
        self._config = config
        self._path = path

    def tensors(
        self, found: dict[tuple[int | None, str], Found]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        spec, tensors = self._spec, self._tensors
        changes: dict[str, tuple[str, Found | None]] = {}
        for (layer, module), each in found.items():
            full = f"layers.{layer}.{module}" if layer is not None else module
            name = spec.head if module == HEAD else self._stored(f"{spec.root}.{full}.weight")
            usual = HEAD if module == HEAD else f"model.{full}"
            changes[name] = usual, each
            if "bias" in each:
                changes[name.removesuffix("weight") + "bias"] = "", {"whole": each["bias"]}
        table = self._stored(f"{spec.root}.{TABLE}.weight")
        tied = head_is_table(spec, tensors, table)
        self.untied = tied and (spec.head in changes or table in changes)
        for name in tensors.names():
            if self.untied and name == spec.head:
                continue
            yield name, self._with(tensors.raw(name), *changes.pop(name, ("", None)))
        if self.untied:
            yield spec.head, self._with(tensors.raw(table), *changes.pop(spec.head, ("", None)))
        if changes:
            raise CheckpointError(f"{tensors.path}: tensor {next(iter(changes))} is missing")

    def _stored(self, name: str) -> str:
        """What the family calls it; some checkpoints leave out the name of the decoder."""
        own = own_name(self._spec, name)
        bare = own.partition(".")[2]
        return bare if own not in self._tensors and bare in self._tensors else own

    def _with(self, stored: torch.Tensor, module: str, found: Found | None) -> torch.Tensor:
        if found is None:
            return stored.clone()
        whole = found.get("whole", found.get("base"))
        weight = (stored if whole is None else whole).float()
        if "A" in found:
            a, b = found["A"].float(), found["B"].float()
            own = own_name(self._spec, f"{module}.").removesuffix(".")
            scale = scale_of(self._config, own, a.shape[0], self._path)
            turned = module.endswith(TABLE)  # [vocab, hidden], of a module with hidden outputs
            weight = weight.t() if turned else weight
            weight = torch.addmm(weight, b, a, alpha=scale)
            if "magnitude" in found:
                weight *= (found["magnitude"].float() / weight.norm(dim=1))[:, None]
            weight = weight.t() if turned else weight
        merged = weight.to(stored.dtype).contiguous()
        if not math.isfinite(merged.sum(dtype=torch.float32)) and not merged.isfinite().all():
            raise CheckpointError(f"{module} with the adapter holds values beyond {stored.dtype}")
        return merged
