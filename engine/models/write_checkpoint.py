"""Writes a checkpoint in Hugging Face layout: tensors in shards, and the other files of the folder."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError, ConfigError

_SHARD_BYTES = 4 << 30


def check_paths(source: Path, target: Path) -> None:
    """Raises CheckpointError where `source` is no directory, ConfigError where `target` is in use."""
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is not a directory in Hugging Face layout: give such a directory"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty: name another directory")


def write_beside(source: Path, target: Path, config: dict[str, Any]) -> None:
    """`config` as config.json, and the tokenizer and templates of `source`."""
    for path in sorted(source.iterdir()):
        beside = path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model")
        if beside and path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy2(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], target: Path) -> int:
    """The bytes written. Makes the directory."""
    target.mkdir(parents=True, exist_ok=True)
    shard: dict[str, torch.Tensor] = {}
    number, total, size = 1, 0, 0
    names: dict[str, int] = {}
    for name, tensor in tensors:
        if size + tensor.nbytes > _SHARD_BYTES and shard:
            _save(shard, target, number)
            number, size = number + 1, 0
        shard[name] = tensor
        names[name] = number
        size += tensor.nbytes
        total += tensor.nbytes
    _save(shard, target, number)
    if number == 1:
        (target / _shard(1)).rename(target / "model.safetensors")
    else:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: _shard(n) for name, n in names.items()},
        }
        (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def _save(shard: dict[str, torch.Tensor], target: Path, number: int) -> None:
    save_file(shard, target / _shard(number), metadata={"format": "pt"})
    shard.clear()


def _shard(number: int) -> str:
    return f"model-{number:05d}.safetensors"
