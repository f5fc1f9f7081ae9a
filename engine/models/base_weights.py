"""The weights of the served checkpoint in floats, read again for what an adapter needs of them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from engine.backends.layers.matrices import MODULES
from engine.model_spec import ModelSpec
from engine.models.checkpoint import model_path, open_checkpoint
from engine.models.tied_head import head_is_table
from engine.models.usual_names import usual_names
from engine.models.weights import TensorSource


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """All in float32; as the checkpoint has them, also where they are served rounded."""

    model: str  # as EngineConfig names it
    spec: ModelSpec

    def matrix(self, layer: int, part: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A part of `matrices.MODULES`: [out, in], and its bias [out]. Raises CheckpointError."""
        name = f"{self.spec.root}.layers.{layer}.{MODULES[part]}"
        with self._open() as source:
            bias = f"{name}.bias"
            return source.read(f"{name}.weight", torch.float32), (
                source.read(bias, torch.float32) if bias in source else None
            )

    def table(self) -> torch.Tensor:
        """[vocab, hidden]"""
        with self._open() as source:
            return source.read(f"{self.spec.root}.embed_tokens.weight", torch.float32)

    def head(self) -> torch.Tensor:
        """[vocab, hidden]"""
        with self._open() as source:
            if not head_is_table(self.spec, source):
                return source.read(self.spec.head, torch.float32)
        return self.table()

    @contextmanager
    def _open(self) -> Iterator[TensorSource]:
        with closing(open_checkpoint(model_path(self.model)).source) as source:
            yield usual_names(source, self.spec)
