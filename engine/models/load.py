"""From a setting to a loaded model: where it is, in which type, on which device."""

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
from engine.models.decoder import Decoder
from engine.models.registry import model_spec, read_config
from engine.models.spec import ModelSpec, eos_ids
from engine.models.weights import Weights, stored_dtype


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    digest: str  # of the configuration and the weight files
    spec: ModelSpec
    native_context: int  # as the checkpoint was configured; `spec.context` is as it is served
    dtype: torch.dtype
    device: torch.device
    decoder: Decoder
    bytes: int  # of the weight files


def load_model(config: EngineConfig) -> LoadedModel:
    """Raises CheckpointError naming the file at fault, ConfigError for a wrong setting."""
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
    """A directory as it is; anything else is a hub id, looked for in the local cache first."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"{name} is no directory: give one in Hugging Face layout, or a hub id"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name} is no directory; to fetch it as a hub id, pip install huggingface_hub"
        ) from None
    wanted = ["*.json", "*.safetensors", "*.jinja"]
    with suppress(Exception):  # not in the cache, whatever the library calls that
        return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        raise CheckpointError(
            f"{name} is no directory and cannot be fetched from the hub: {error}"
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
        raise ConfigError(f"device is {name!r}, but torch sees no CUDA device")
    return device


def choose_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` keeps the stored type; on a CPU half types become bfloat16 where the processor
    multiplies it, else float32."""
    if name != "auto":
        asked: torch.dtype = getattr(torch, name)
        return asked
    if device.type != "cpu" or stored == torch.float32:
        return stored
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def served_context(spec: ModelSpec, asked: int | None) -> int:
    """The model's own context, stretched by its rotary factor where the scaling is meant so."""
    factor = spec.rope.values.get("factor") or 1.0
    longest = spec.context
    if spec.rope.kind in ("linear", "dynamic"):
        longest = int(spec.context * factor)
    elif spec.rope.kind == "yarn":
        original = spec.rope.values.get("original_max_position_embeddings") or spec.context
        longest = max(spec.context, int(original * factor))
    if asked is None:
        return longest
    if asked > longest:
        raise ConfigError(f"max_context is {asked}: the model's own is {longest}")
    return asked


def _generation_eos(directory: Path) -> tuple[int, ...]:
    """End ids of generation_config.json, which chat models keep there."""
    try:
        raw = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
        return eos_ids(raw.get("eos_token_id"))
    except (OSError, ValueError, AttributeError):
        return ()


def _digest(directory: Path) -> str:
    """Over names, sizes and the content of small files; of large ones the first and last MiB.

    Enough to tell checkpoints apart without reading tens of gigabytes twice.
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
