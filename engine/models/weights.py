"""A checkpoint's tensors, read one at a time and cast to the served dtype and device."""

import sys
from pathlib import Path
from typing import Protocol

import torch

from engine.errors import CheckpointError


class TensorSource(Protocol):
    """Tensors by the names that Hugging Face checkpoints give them. Methods raise CheckpointError."""

    path: Path  # of the file, or of the directory

    def __contains__(self, name: str) -> bool: ...

    def __len__(self) -> int: ...

    def place(self, name: str) -> str:
        """The file, and the tensor's name in it."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...

    def stored_dtype(self) -> torch.dtype:
        """The type that most of it is written in."""

    def close(self) -> None: ...


class Weights:
    """Reads tensors by name, checks shape and values, and casts them to the served dtype."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._source = source
        self._taken = 0
        self._bar = sys.stderr.isatty()

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor in the served dtype on the device.

        Raises CheckpointError, naming file and tensor, when it is missing, has another shape, is
        not a float tensor, or holds a value that is not finite.
        """
        if name not in self:
            raise CheckpointError(f"{self._source.path}: tensor {name} is missing")
        place, found = self._source.place(name), self._source.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{place} has shape {list(found)}, the configuration asks {list(shape)}"
            )
        tensor = self._source.read(name, self.dtype)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{place} holds NaN or infinite values in {self.dtype}")
        self._taken += 1
        self._progress()
        return tensor.to(self.device)

    def take_optional(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        return self.take(name, shape) if name in self else None

    def close(self) -> None:
        """Ends the line of progress; the source is its owner's to close."""
        if self._bar:
            sys.stderr.write("\n")

    def _progress(self) -> None:
        if self._bar:
            sys.stderr.write(f"\rloading weights {self._taken}/{len(self._source)}")
            sys.stderr.flush()
