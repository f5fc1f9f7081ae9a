"""Loads a model: finds its directory, and chooses dtype, device and context length."""

import hashlib
import json
import os
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.layers.linear import multiplies_bfloat16
from engine.model_spec import ModelSpec, eos_ids
from engine.models.decoder import Decoder
from engine.models.registry import model_spec, read_config
from engine.models.weights import Weights, stored_dtype


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    digest: str  # of the configuration and the weight files
    spec: ModelSpec
    native_context: int  # the checkpoint's context length; `spec.context` is the served one
    dtype: torch.dtype
    device: torch.device
    decoder: Decoder
    bytes: int  # of the weight files


def load_model(config: EngineConfig) -> LoadedModel:
    """Raises CheckpointError naming the file at fault, or ConfigError for a wrong setting."""
    directory = model_directory(config.model)
    raw = read_config(directory)
    spec = model_spec(raw)
    generation_eos = _generation_eos(directory)
    spec = replace(spec, eos=tuple(dict.fromkeys((*generation_eos, *spec.eos))))
    native = spec.context
    spec = replace(spec, context=served_context(spec, config.max_context))
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, stored_dtype(directory), device)
    with closing(Weights(directory, dtype, device)) as weights:
        decoder = Decoder(spec, weights)
    return LoadedModel(
        name=config.model,
        digest=_digest(directory),
        spec=spec,
        native_context=native,
        dtype=dtype,
        device=device,
        decoder=decoder,
        bytes=sum(path.stat().st_size for path in directory.glob("*.safetensors")),
    )


def model_directory(name: str) -> Path:
    """`name` if it is a directory; otherwise the snapshot of the hub id `name`, from the local
    cache if it is there."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"{name} is not a directory: use one in Hugging Face layout, or a hub id"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name} is not a directory; to download it as a hub id, pip install huggingface_hub"
        ) from None
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    with suppress(Exception):  # not in the cache; the exception depends on the library's version
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(
            f"{name} is not a directory and cannot be downloaded from the hub: {error}"
        ) from None


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no CUDA device: use cpu")
    return device


def choose_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` keeps the stored dtype; on a CPU, half types become bfloat16 if the processor
    multiplies it, otherwise float32."""
    if name != "auto":
        requested: torch.dtype = getattr(torch, name)
        return requested
    if device.type != "cpu" or stored == torch.float32:
        return stored
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def served_context(spec: ModelSpec, requested: int | None) -> int:
    """The context length to serve: `requested`, or the model's own, extended by its rotary factor if
    its kind of scaling does that."""
    factor = spec.rope.values.get("factor") or 1.0
    longest = spec.context
    if spec.rope.kind in ("linear", "dynamic"):
        longest = int(spec.context * factor)
    elif spec.rope.kind == "yarn":
        original = spec.rope.values.get("original_max_position_embeddings") or spec.context
        longest = max(spec.context, int(original * factor))
    if requested is None:
        return longest
    if requested > longest:
        raise ConfigError(f"max_context is {requested}: the model's context length is {longest}")
    return requested


def _generation_eos(directory: Path) -> tuple[int, ...]:
    """The end ids in generation_config.json, where chat models store theirs."""
    try:
        raw = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
        return eos_ids(raw.get("eos_token_id"))
    except (OSError, ValueError, AttributeError):
        return ()


def _digest(directory: Path) -> str:
    """A SHA-256 over names, sizes and content; of large files, only the first and last MiB.

    This tells checkpoints apart without reading tens of gigabytes twice.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*")):
        if path.suffix not in (".json", ".safetensors") or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            if size > 2 << 20:
                file.seek(-(1 << 20), os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest()
