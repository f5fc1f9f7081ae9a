"""A checkpoint's tensors, read one at a time: as codes, or cast to the served dtype and device."""

import sys
from pathlib import Path
from typing import Protocol

import torch

from engine.backends.compiled.linear import has_kernel
from engine.backends.layers.packed import Codes
from engine.backends.layers.quantise import quantize
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

    @property
    def format(self) -> str:
        """The name of the quantised format that it is stored in, or nothing."""

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        """A matrix that is stored quantised; None for any other tensor, and for one in FP8 or MXFP4
        unless `small_floats` asks for them."""

    def stored_dtype(self) -> torch.dtype:
        """The type that most of it is written in."""

    def close(self) -> None: ...


class Weights:
    """Reads tensors by name, and checks shape and values. `quantization` is that of EngineConfig;
    `by_row`: the layers made of them compute each row by itself."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str = "auto",
        by_row: bool = False,
    ) -> None:
        self.bytes = 0  # of the weights as they are served
        self.dtype = dtype
        self.by_row = by_row
        self._quantization = quantization
        self.device = device
        self.source = source
        self._taken = 0
        self._bar = sys.stderr.isatty()

    def __contains__(self, name: str) -> bool:
        return name in self.source

    @property
    def on_device(self) -> bool:
        """Whether the kernels of a GPU compute with them."""
        return self.device.type != "cpu"

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor in the served dtype on the device.

        Raises CheckpointError, naming file and tensor, when it is missing, has another shape, is
        not a float tensor, or holds a value that is not finite.
        """
        place = self._place(name, shape)
        tensor = self.source.read(name, self.dtype)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{place} holds NaN or infinite values in {self.dtype}")
        self._count(tensor.nbytes)
        return tensor.to(self.device)

    def codes(self, name: str, shape: tuple[int, int], embedding: bool = False) -> Codes | None:
        """The matrix in codes, if it is served so. An embedding has eight bits with `int4` too."""
        if self._quantization == "none":
            return None
        if self._quantization == "auto" and not self.on_device and not has_kernel():
            return None  # torch's products of codes save memory, but take many times as long
        place = self._place(name, shape)
        if self._quantization == "auto":
            found = self.source.codes(name, self.on_device)
        else:
            dense = self.source.read(name, torch.float32)
            if not torch.isfinite(dense).all():
                raise CheckpointError(f"{place} holds NaN or infinite values")
            found = quantize(dense, "int8" if embedding else self._quantization)
        if found is None:
            return None
        for part in (found.scales, found.minima):
            if part is not None and not torch.isfinite(part).all():
                raise CheckpointError(f"{place} holds scales that are NaN or infinite")
        self._count(found.bytes)
        return found

    def _place(self, name: str, shape: tuple[int, ...]) -> str:
        if name not in self:
            raise CheckpointError(f"{self.source.path}: tensor {name} is missing")
        place, found = self.source.place(name), self.source.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{place} has shape {list(found)}, the configuration asks for {list(shape)}"
            )
        return place

    def _count(self, size: int) -> None:
        self.bytes += size
        self._taken += 1
        self._progress()

    def take_optional(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        return self.take(name, shape) if name in self else None

    def close(self) -> None:
        """Ends the line of progress; the source is its owner's to close."""
        if self._bar:
            sys.stderr.write("\n")

    def _progress(self) -> None:
        if self._bar:
            sys.stderr.write(f"\rloading weights {self._taken}/{len(self.source)}")
            sys.stderr.flush()
