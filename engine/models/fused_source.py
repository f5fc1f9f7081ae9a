"""Checkpoints with names of their own, or that hold the matrices of one input as one: each matrix by
the name that Llama's has."""

from pathlib import Path

import torch

from engine.backends.layers.matrices import MODULES, fused_rows, own_name
from engine.backends.layers.packed import Codes
from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.weights import TensorSource


class FusedSource:
    """Implements `engine.models.weights.TensorSource` over another source."""

    def __init__(self, source: TensorSource, spec: ModelSpec) -> None:
        self.path: Path = source.path
        self._source = source
        self._spec = spec
        # By the module of a part: that of the whole, the part's rows in it, and how many it has.
        self._rows: dict[str, tuple[str, torch.Tensor, int]] = {}
        for whole in spec.fused:
            rows = fused_rows(spec, whole)
            total = sum(map(len, rows.values()))
            self._rows |= {MODULES[part]: (whole, each, total) for part, each in rows.items()}

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
        return len(rows), *shape[1:]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored, rows, _ = self._find(name)
        tensor = self._source.read(stored, dtype)
        return tensor if rows is None else tensor[rows]

    @property
    def format(self) -> str:
        return self._source.format

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        stored, rows, _ = self._find(name)
        found = self._source.codes(stored, small_floats)
        if found is None or rows is None:
            return found
        return found.rows(rows)

    def stored_dtype(self) -> torch.dtype:
        return self._source.stored_dtype()

    def close(self) -> None:
        self._source.close()

    def _find(self, name: str) -> tuple[str, torch.Tensor | None, int]:
        """The stored tensor's name, the rows of it that `name` is, and how many it has in all."""
        pieces = name.rsplit(".", 3)
        found = self._rows.get(".".join(pieces[1:3])) if len(pieces) == 4 else None
        if found is None:
            return self._own(name), None, 0
        whole, rows, total = found
        return self._own(f"{pieces[0]}.{whole}.{pieces[3]}"), rows, total

    def _own(self, name: str) -> str:
        """What the family calls it; some checkpoints leave out the name of the decoder."""
        own = own_name(self._spec, name)
        bare = own.partition(".")[2]
        return bare if own not in self._source and bare in self._source else own
