"""Writes a checkpoint with its layers' matrices quantised, in compressed-tensors' `pack-quantized`."""

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError, ConfigError
from engine.layers.matrices import FUSED, MODULES
from engine.models.compressed_tensors import PACKED, SCALE, SHAPE, ZERO, packed
from engine.models.registry import model_spec, read_config
from engine.models.safetensors_source import SafetensorsSource
from engine.quantization.packed import GROUP
from engine.quantization.quantize import quantize

FORMATS = {"int8": 8, "int4": 4}
_SHARD_BYTES = 4 << 30
_ENDINGS = tuple(f"{module}.weight" for module in (*MODULES.values(), *FUSED))
_UNREAD = ("vision_tower.", "multi_modal_projector.")  # by this engine: left as they are
_EXPERT = re.compile(r"\.(experts\.\d+|shared_expert)\.\w+\.weight$")


def write_quantized(source: Path, target: Path, to: str) -> int:
    """The bytes written. `target` must not exist, or be empty; embedding, head and norms stay as
    they are. Raises CheckpointError or ConfigError."""
    if to not in FORMATS:
        raise ConfigError(f"{to!r} is not a known format: use one of {', '.join(FORMATS)}")
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is not a directory in Hugging Face layout: give such a directory"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty: name another directory")
    config = read_config(source)
    spec = model_spec(config)
    if spec.renamed or (spec.experts is not None and spec.experts.stacked):
        raise ConfigError(
            f"{source}: checkpoints of this family are not written quantised: serve it with "
            f"--quantization {to}, which rounds its weights when they are loaded"
        )
    if config.get("quantization_config"):
        raise CheckpointError(f"{source} is quantised already: give the checkpoint in floats")
    target.mkdir(parents=True, exist_ok=True)
    with closing(SafetensorsSource(source)) as tensors:
        written = _write_tensors(tensors, target, to)
    for path in sorted(source.iterdir()):
        beside = path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model")
        if beside and path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy2(path, target / path.name)
    config["quantization_config"] = declared(to)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return written


def declared(to: str) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    weights = {
        "num_bits": FORMATS[to],
        "type": "int",
        "symmetric": to == "int8",
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.gate$", r"re:.*\.shared_expert_gate$", "re:vision_tower.*"],
    }


def _write_tensors(tensors: SafetensorsSource, target: Path, to: str) -> int:
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    names: dict[str, int] = {}
    for name in tensors.names():
        for key, tensor in _stored(tensors, name, to).items():
            if sizes[-1] + tensor.nbytes > _SHARD_BYTES and shards[-1]:
                _save(shards[-1], target, len(shards))
                shards.append({})
                sizes.append(0)
            shards[-1][key] = tensor
            names[key] = len(shards)
            sizes[-1] += tensor.nbytes
    _save(shards[-1], target, len(shards))
    if len(shards) == 1:
        (target / _shard(1)).rename(target / "model.safetensors")
    else:
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {key: _shard(number) for key, number in names.items()},
        }
        (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sum(sizes)


def _stored(tensors: SafetensorsSource, name: str, to: str) -> dict[str, torch.Tensor]:
    stored = tensors.raw(name)
    matrix = name.endswith(_ENDINGS) or _EXPERT.search(name) is not None
    if not matrix or name.startswith(_UNREAD):
        return {name: stored}
    if stored.shape[1] % GROUP:
        raise CheckpointError(
            f"{tensors.place(name)} has {stored.shape[1]} inputs, which are not whole groups of {GROUP}"
        )
    if not torch.isfinite(stored).all():
        raise CheckpointError(f"{tensors.place(name)} holds NaN or infinite values")
    found, bits = quantize(stored.float(), to), FORMATS[to]
    middle = 1 << (bits - 1)
    scales = torch.where(found.scales > 0, found.scales, 1.0)  # of a group of zeros
    parts = {
        name + PACKED: packed(found.codes.short() - middle, bits),
        name + SHAPE: torch.tensor(stored.shape),
        name + SCALE: scales.half(),
    }
    if found.minima is not None:
        zeros = (-found.minima / scales).round().short() - middle
        parts[name + ZERO] = packed(zeros.t(), bits).t().contiguous()
    return parts


def _save(shard: dict[str, torch.Tensor], target: Path, number: int) -> None:
    save_file(shard, target / _shard(number), metadata={"format": "pt"})
    shard.clear()


def _shard(number: int) -> str:
    return f"model-{number:05d}.safetensors"
