"""A checkpoint's tensors in one or several safetensors files, with an index beside several."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.backends.layers.packed import Codes
from engine.errors import CheckpointError
from engine.models.formats.quantised import refuse_companions

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsSource:
    """Implements `engine.models.weights.TensorSource`."""

    def __init__(self, directory: Path, allowed: tuple[str, ...] = ()) -> None:
        """`allowed`: endings of tensors of quantised formats that may be there."""
        self.path = directory
        self._files = _files_by_tensor(directory)
        refuse_companions(self._files, allowed)
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def names(self) -> list[str]:
        return list(self._files)

    def raw(self, name: str) -> torch.Tensor:
        """As it is stored."""
        stored = self._slice(name)
        if not stored.get_shape():  # a single number, of which the library has no slices
            tensor: torch.Tensor = self._open[self._files[name]].get_tensor(name)
            return tensor
        tensor = stored[:]
        return tensor

    def part(self, name: str, number: int) -> torch.Tensor:
        """One entry of the tensor's first dimension, as it is stored."""
        tensor: torch.Tensor = self._slice(name)[number]
        return tensor

    def place(self, name: str) -> str:
        return f"{self._files[name]}: {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._slice(name)[:]
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
        path = next(iter(self._files.values()))
        with safe_open(path, framework="pt") as file:
            kinds = Counter(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
        most = kinds.most_common(1)[0][0]
        if most not in _DTYPES:
            raise CheckpointError(f"{path}: weights are stored as {most}: use F32, BF16 or F16")
        return _DTYPES[most]

    def close(self) -> None:
        self._open.clear()

    def _slice(self, name: str) -> Any:
        path = self._files[name]
        try:
            if path not in self._open:
                self._open.clear()  # one file mapped at a time
                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.place(name)} cannot be read: {error}") from None


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    if index.exists():
        return _from_index(directory, index)
    single = directory / _SINGLE
    if not single.exists():
        raise CheckpointError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")
    return dict.fromkeys(_names(single), single)


def _from_index(directory: Path, index: Path) -> dict[str, Path]:
    if not index.is_file():
        raise CheckpointError(f"{index} is not a regular file")
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: directory / Path(file).name for name, file in mapping.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from None
    if not files:
        raise CheckpointError(f"{index} names no tensors in weight_map")
    for path in sorted(set(files.values())):
        present = set(_names(path))
        absent = [name for name, file in files.items() if file == path and name not in present]
        if absent:
            raise CheckpointError(f"{index} places {absent[0]} in {path.name}, which lacks it")
    return files


def _names(path: Path) -> list[str]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    if not path.is_file():  # a pipe or a device would never end
        raise CheckpointError(f"{path} is not a regular file")
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from None
