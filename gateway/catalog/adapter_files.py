"""Reads what registering a LoRA adapter in PEFT layout needs. Weights are hashed, not loaded."""

from dataclasses import dataclass
from pathlib import Path

from core.errors import BadRequest
from engine.adapters.digest import CONFIG, WEIGHTS, adapter_digest, read_config
from engine.adapters.peft.config import refuse_unserved
from engine.adapters.peft.shapes import check_shapes
from engine.errors import AdapterError
from engine.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    path: Path
    digest: str  # SHA-256 by which the engine identifies the adapter
    rank: int
    bytes: int
    unserved: str = ""  # why the built-in engine does not serve it; upstreams decide for themselves

    def check_served(self, spec: ModelSpec | None) -> None:
        """Raises BadRequest where the built-in engine does not serve it, or its tensors have not the
        shapes of its base model, if that is known."""
        if self.unserved:
            raise _invalid(self.unserved)
        if spec is None:
            return
        try:
            check_shapes(self.path, spec)
        except AdapterError as error:
            raise _invalid(error.message.replace(f"{self.path}/", "")) from None


def read_adapter(directory: Path) -> AdapterFiles:
    """Raises BadRequest, without paths of this machine, if the directory is not an adapter."""
    try:
        digest, config = adapter_digest(directory), read_config(directory)
    except AdapterError as error:
        raise _invalid(error.message.replace(f"{directory}/", "")) from None
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise _invalid(f"{CONFIG} says rank {rank!r}")
    size, unserved = (directory / WEIGHTS).stat().st_size, ""
    try:
        refuse_unserved(directory / CONFIG, config)
    except AdapterError as error:
        unserved = error.message.replace(f"{directory}/", "")
    return AdapterFiles(directory, digest, rank, size, unserved)


def _invalid(problem: str) -> BadRequest:
    return BadRequest(
        f"This is not a LoRA adapter: {problem}.",
        next_step="Name a directory in PEFT layout with safetensors weights.",
        param="lora_path",
        code="invalid_adapter",
    )
