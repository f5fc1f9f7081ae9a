"""A checkpoint's tensors, read one at a time from one or several safetensors files."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.models.quantised import refuse_companions

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Weights:
    """Reads tensors by name, checks shape and values, and casts them to the served dtype."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._files = _files_by_tensor(directory)
        self._open: dict[Path, Any] = {}
        self._taken = 0
        self._bar = sys.stderr.isatty()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor in the served dtype on the device.

        Raises CheckpointError, naming file and tensor, when it is missing, has another shape, is
        not a float tensor, or holds a value that is not finite.
        """
        path = self._files.get(name)
        if path is None:
            raise CheckpointError(f"tensor {name} is missing in the checkpoint's safetensors files")
        try:
            tensor: torch.Tensor = self._handle(path).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, config.json needs {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype}: only float weights are supported"
            )
        tensor = tensor.to(self.dtype)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: {name} has NaN or infinite values in {self.dtype}")
        self._taken += 1
        self._progress()
        return tensor.to(self.device)

    def take_optional(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        return self.take(name, shape) if name in self else None

    def close(self) -> None:
        self._open.clear()
        if self._bar:
            sys.stderr.write("\n")

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            self._open.clear()  # one file mapped at a time
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _progress(self) -> None:
        if self._bar:
            sys.stderr.write(f"\rloading weights {self._taken}/{len(self._files)}")
            sys.stderr.flush()


def stored_dtype(directory: Path) -> torch.dtype:
    """The dtype of most tensors in the checkpoint's first file."""
    path = next(iter(_files_by_tensor(directory).values()))
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    with safe_open(path, framework="pt") as file:
        kinds = Counter(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
    most = kinds.most_common(1)[0][0]
    if most not in names:
        raise CheckpointError(f"{path}: weights are stored as {most}: use F32, BF16 or F16")
    return names[most]


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    files = _listed(directory)
    refuse_companions(files)
    return files


def _listed(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    if index.exists():
        return _from_index(directory, index)
    single = directory / _SINGLE
    if not single.exists():
        raise CheckpointError(f"{directory} has neither {_SINGLE} nor {_INDEX}")
    return dict.fromkeys(_names(single), single)


def _from_index(directory: Path, index: Path) -> dict[str, Path]:
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: directory / Path(file).name for name, file in mapping.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from None
    for path in sorted(set(files.values())):
        present = set(_names(path))
        absent = [name for name, file in files.items() if file == path and name not in present]
        if absent:
            raise CheckpointError(f"{index} lists {absent[0]} in {path.name}, which lacks it")
    return files


def _names(path: Path) -> list[str]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from None
