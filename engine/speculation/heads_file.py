"""The file of draft heads: found, and checked against the served model before its weights are read."""

import hashlib
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.model_spec import ModelSpec
from engine.models.checkpoint import DRAFT_HEADS, model_path
from engine.models.formats.safetensors_file import SafetensorsFile
from engine.speculation.vocabulary import vocabulary_of

FORMAT = "tollhouse-draft-heads-1"


@dataclass(frozen=True, slots=True)
class HeadsFile:
    """What the file's header says."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]

    def check(self, spec: ModelSpec, model: Path) -> None:
        """Raises ConfigError naming what does not fit the served model."""
        if self.metadata.get("format") != FORMAT:
            raise ConfigError(
                f"{self.path} has the format {self.metadata.get('format')!r}, this engine reads "
                f"{FORMAT!r}: train heads with `python -m training.draft_heads`"
            )
        wanted = self._wanted(spec)
        for name, shape in wanted.items():
            if name not in self.shapes:
                raise ConfigError(f"{self.path}: tensor {name} is missing")
            if self.shapes[name] != shape:
                raise ConfigError(
                    f"{self.path}: tensor {name} has shape {list(self.shapes[name])}, the model asks "
                    f"for {list(shape)}"
                )
        if foreign := sorted(self.shapes.keys() - wanted.keys()):
            raise ConfigError(f"{self.path}: tensor {foreign[0]} is not known in this format")
        if self.metadata.get("vocabulary") != vocabulary_digest(spec, model):
            raise ConfigError(
                f"{self.path} was trained for another vocabulary than that of {model}: use heads that "
                "were trained for this model"
            )
        ids = self.read("ids", torch.int64) if "ids" in wanted else torch.zeros(1)
        if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab:
            raise ConfigError(f"{self.path}: tensor ids has ids outside of 0 to {spec.vocab - 1}")

    def _wanted(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        width, inner = spec.hidden, self.shapes.get("down.weight", (0, 0))[-1]
        wanted: dict[str, tuple[int, ...]] = {
            "merge.weight": (width, 2 * width),
            "gate_up.weight": (2 * inner, width),
            "down.weight": (width, inner),
        }
        if "ids" in self.shapes or "head.weight" in self.shapes:
            count = self.shapes.get("ids", (0,))[0]
            wanted |= {"ids": (count,), "head.weight": (count, width)}
        return wanted

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        with closing(SafetensorsFile(self.path)) as file:
            tensor = file.read(name).to(dtype)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self.path}: tensor {name} holds NaN or infinite values")
        return tensor


def find_heads(config: EngineConfig) -> HeadsFile | None:
    """The configured file, or with `auto` the one in the checkpoint's folder, if it is used at all."""
    if config.draft_heads == "none" or config.speculation == "off":
        return None
    if config.draft_heads != "auto":
        path = Path(config.draft_heads).expanduser()
        path = path / DRAFT_HEADS if path.is_dir() else path
        if not path.exists():
            raise ConfigError(
                f"draft_heads is {config.draft_heads!r}: there is no file {path}; give a folder with "
                f"{DRAFT_HEADS}, auto or none"
            )
        return _opened(path)
    model = model_path(config.model)
    path = model.parent / DRAFT_HEADS if model.is_file() else model / DRAFT_HEADS
    return _opened(path) if config.draft_model is None and path.exists() else None


def _opened(path: Path) -> HeadsFile:
    try:
        with closing(SafetensorsFile(path)) as file:
            shapes = {name: file.shape(name) for name in file.names()}
            return HeadsFile(path, shapes, file.metadata)
    except CheckpointError as error:
        raise ConfigError(error.message) from None


def vocabulary_digest(spec: ModelSpec, model: Path) -> str:
    """Of the tokenizer's ids; of a checkpoint without a tokenizer, of their number."""
    found = vocabulary_of(model)
    content = spec.vocab if found is None else sorted(found.items())
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
