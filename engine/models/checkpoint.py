"""A checkpoint on disk: a directory in Hugging Face layout, or one GGUF file."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.models.config_values import eos_ids
from engine.models.formats.compressed_tensors import CompressedSource
from engine.models.formats.declared import float8, grouped
from engine.models.formats.float8 import Float8Source
from engine.models.formats.grouped import GroupedSource
from engine.models.formats.quantised import MXFP4, is_compressed, is_mxfp4, is_sorted, rounds_rows
from engine.models.formats.safetensors_source import SafetensorsSource
from engine.models.gguf.describe import config_of
from engine.models.gguf.header import read_header
from engine.models.gguf.weights import GgufSource
from engine.models.registry import read_config
from engine.models.weights import TensorSource
from engine.regular_files import read_text

_MIB = 1 << 20
DRAFT_HEADS = "draft_heads.safetensors"  # next to the weights; see `engine.speculation.heads`
_WANTED = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    config: dict[str, Any]
    source: TensorSource
    eos: tuple[int, ...]  # end ids in addition to those of the configuration
    digest: str  # of the configuration and the weights


def model_path(name: str) -> Path:
    """A directory or a .gguf file as it is; anything else is a hub id, looked for in the local cache
    first."""
    path = Path(name).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"{name} is neither a directory nor a .gguf file: give a directory in Hugging Face layout, "
            "a .gguf file, or a hub id"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name} is not a directory; to fetch it as a hub id, pip install huggingface_hub"
        ) from None
    with suppress(Exception):  # not in the cache, whatever the library calls that
        return Path(snapshot_download(name, allow_patterns=_WANTED, local_files_only=True))
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:
        raise CheckpointError(
            f"{name} is not a directory and cannot be fetched from the hub: {error}"
        ) from None


def is_gguf(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() == ".gguf"


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises CheckpointError naming the file at fault. The source is the caller's to close."""
    return _open_gguf(path) if path.is_file() else _open_directory(path)


def _open_gguf(path: Path) -> Checkpoint:
    header = read_header(path)
    config = config_of(header)
    digest = hashlib.sha256()
    for part in header.parts:
        _add_content(digest, part)
    return Checkpoint(config, GgufSource(header), (), digest.hexdigest())


def _open_directory(directory: Path) -> Checkpoint:
    config = read_config(directory)
    return Checkpoint(
        config=config,
        source=_source(directory, config),
        eos=_generation_eos(directory),
        digest=_directory_digest(directory),
    )


def _source(directory: Path, config: dict[str, Any]) -> SafetensorsSource:
    """By what the configuration says of quantised weights."""
    by_group = grouped(config)
    if by_group is not None:
        return GroupedSource(directory, by_group)
    blocks = float8(config)
    if blocks is not None:
        return Float8Source(directory, blocks, rounds_rows(config))
    if is_compressed(config):
        return CompressedSource(directory, is_sorted(config), rounds_rows(config))
    return SafetensorsSource(directory, MXFP4 if is_mxfp4(config) else ())


def _generation_eos(directory: Path) -> tuple[int, ...]:
    """End ids of generation_config.json, which chat models keep there."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        raw = json.loads(read_text(path))
        found = eos_ids(raw.get("eos_token_id"))
        return found if all(type(each) is int for each in found) else ()
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return ()


def _directory_digest(directory: Path) -> str:
    """Over names, sizes and content of the configuration and the weight files."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*")):
        if path.name == DRAFT_HEADS:
            continue  # guesses change no key and no value
        if path.suffix in (".json", ".safetensors") and path.is_file():
            digest.update(f"{path.name}\0".encode())
            _add_content(digest, path)
    return digest.hexdigest()


def _add_content(digest: "hashlib._Hash", path: Path) -> None:
    """Of a large file its size and its first and last MiB: enough to tell checkpoints apart without
    reading tens of gigabytes twice."""
    size = path.stat().st_size
    digest.update(f"{size}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(_MIB))
        if size > 2 * _MIB:
            file.seek(-_MIB, os.SEEK_END)
            digest.update(file.read())
