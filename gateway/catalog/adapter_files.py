"""A LoRA adapter's directory in PEFT layout, read far enough to register it. No weights are loaded."""

from dataclasses import dataclass
from pathlib import Path

from core.errors import BadRequest
from engine.adapter_name import CONFIG, WEIGHTS, adapter_digest, read_config
from engine.errors import AdapterError


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    path: Path
    digest: str  # the adapter's identity, as the engine names it
    rank: int
    bytes: int


def read_adapter(directory: Path) -> AdapterFiles:
    """BadRequest where the directory is not an adapter; the paths of this machine are not told."""
    try:
        digest, config = adapter_digest(directory), read_config(directory)
    except AdapterError as error:
        raise _invalid(error.message.replace(f"{directory}/", "")) from None
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise _invalid(f"{CONFIG} says rank {rank!r}")
    return AdapterFiles(directory, digest, rank, (directory / WEIGHTS).stat().st_size)


def _invalid(problem: str) -> BadRequest:
    return BadRequest(
        f"This is not a LoRA adapter: {problem}.",
        next_step="Give a directory in PEFT layout with safetensors weights.",
        param="lora_path",
        code="invalid_adapter",
    )
