"""Checkpoints that hold the matrices of one input as one: the rows of each by its usual name."""

from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.layers.matrices import FUSED, MODULES, part_shape
from engine.model_spec import ModelSpec
from engine.models.weights import TensorSource
from engine.quantization.packed import Codes


class FusedSource:
    """Implements `engine.models.weights.TensorSource` over another source."""

    def __init__(self, source: TensorSource, spec: ModelSpec) -> None:
        self.path: Path = source.path
        self._source = source
        # By the module of a part: that of the whole, the part's rows in it, and the whole's.
        self._rows: dict[str, tuple[str, slice, int]] = {}
        for whole, parts in FUSED.items():
            outs = [part_shape(spec, part)[1] for part in parts]
            first = 0
            for part, out in zip(parts, outs, strict=True):
                self._rows[MODULES[part]] = whole, slice(first, first + out), sum(outs)
                first += out

    def __contains__(self, name: str) -> bool:
        return self._find(name)[0] in self._source

    def __len__(self) -> int:
        return len(self._source)

    def place(self, name: str) -> str:
        return self._source.place(self._find(name)[0])

    def shape(self, name: str) -> tuple[int, ...]:
        stored, rows, total = self._find(name)
        shape = self._source.shape(stored)
        if rows is None:
            return shape
        if not shape or shape[0] != total:
            raise CheckpointError(
                f"{self._source.place(stored)} has shape {list(shape)}, the configuration asks "
                f"{total} rows"
            )
        return rows.stop - rows.start, *shape[1:]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored, rows, _ = self._find(name)
        tensor = self._source.read(stored, dtype)
        return tensor if rows is None else tensor[rows].clone()

    @property
    def format(self) -> str:
        return self._source.format

    def codes(self, name: str) -> Codes | None:
        stored, rows, _ = self._find(name)
        found = self._source.codes(stored)
        if found is None or rows is None:
            return found
        return found.rows(torch.arange(rows.start, rows.stop))

    def stored_dtype(self) -> torch.dtype:
        return self._source.stored_dtype()

    def close(self) -> None:
        self._source.close()

    def _find(self, name: str) -> tuple[str, slice | None, int]:
        """The stored tensor's name, the rows of it that `name` is, and how many it has in all."""
        pieces = name.rsplit(".", 3)
        found = self._rows.get(".".join(pieces[1:3])) if len(pieces) == 4 else None
        if found is None:
            return name, None, 0
        whole, rows, total = found
        return f"{pieces[0]}.{whole}.{pieces[3]}", rows, total
