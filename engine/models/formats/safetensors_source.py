"""A checkpoint's tensors in one or several safetensors files, with an index if there are several."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from engine.backends.layers.packed import Codes
from engine.errors import CheckpointError
from engine.json_fields import TEXT, shown, shown_name
from engine.models.formats.quantised import refuse_companions
from engine.models.formats.safetensors_file import SafetensorsFile
from engine.regular_files import read_text

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_NAME = 255  # characters of a shard's
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsSource:
    """Implements `engine.models.weights.TensorSource`."""

    def __init__(self, directory: Path, allowed: tuple[str, ...] = ()) -> None:
        """`allowed`: endings of tensors of quantised formats that may be there."""
        self.path = directory
        self._files = _files_by_tensor(directory)
        try:
            refuse_companions(self._files, allowed)
        except CheckpointError:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def names(self) -> list[str]:
        return list(self._files)

    def raw(self, name: str) -> torch.Tensor:
        """As it is stored."""
        return self._files[name].read(name)

    def part(self, name: str, number: int) -> torch.Tensor:
        """One entry of the tensor's first dimension, as it is stored."""
        return self._files[name].part(name, number)

    def place(self, name: str) -> str:
        return f"{self._files[name].path}: {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.raw(name)
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.place(name)} is {tensor.dtype}: only float weights are served"
            )
        return tensor.to(dtype)

    @property
    def format(self) -> str:
        return ""

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        return None

    def stored_dtype(self) -> torch.dtype:
        """The type that most of the checkpoint's first file is written in."""
        file = next(iter(self._files.values()))
        most = Counter(map(file.dtype, file.names())).most_common(1)[0][0]
        if most not in _DTYPES:
            raise CheckpointError(
                f"{file.path}: weights are stored as {most}: use F32, BF16 or F16"
            )
        return _DTYPES[most]

    def close(self) -> None:
        _close(self._files)


def _files_by_tensor(directory: Path) -> dict[str, SafetensorsFile]:
    index = directory / _INDEX
    if index.exists():
        return _from_index(directory, index)
    single = directory / _SINGLE
    if not single.exists():
        raise CheckpointError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")
    file = SafetensorsFile(single)
    if not file.names():
        file.close()
        raise CheckpointError(f"{single} holds no tensors")
    return dict.fromkeys(file.names(), file)


def _from_index(directory: Path, index: Path) -> dict[str, SafetensorsFile]:
    try:
        content = json.loads(read_text(index))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from None
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{index}: weight_map is not an object of tensors and their files")
    placed = {name: _shard(directory, index, name, file) for name, file in mapping.items()}
    opened: dict[Path, SafetensorsFile] = {}
    found: dict[str, SafetensorsFile] = {}
    try:
        for path in sorted(set(placed.values())):
            opened[path] = SafetensorsFile(path)
        names = {path: set(file.names()) for path, file in opened.items()}
        for name, path in placed.items():
            if name not in names[path]:
                raise CheckpointError(
                    f"{index} places {shown_name(name)} in {path.name}, which lacks it"
                )
            found[name] = opened[path]
    except CheckpointError:
        for file in opened.values():
            file.close()
        raise
    return found


def _shard(directory: Path, index: Path, name: str, file: Any) -> Path:
    """In the directory, whatever folders the index names."""
    last = Path(file).name if TEXT[1](file) and "\0" not in file and len(file) < _MOST_NAME else ""
    if last in ("", "..", "."):
        raise CheckpointError(
            f"{index}: weight_map places {shown_name(name)} in {shown(file)}, which is not a file name"
        )
    return directory / last


def _close(files: dict[str, SafetensorsFile]) -> None:
    for file in {id(each): each for each in files.values()}.values():
        file.close()
