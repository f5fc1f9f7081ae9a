"""A LoRA adapter's directory in PEFT layout, read far enough to register it. No weights are loaded."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from core.errors import BadRequest

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    path: Path
    digest: str  # SHA-256 of the weights file: the adapter's identity
    rank: int
    bytes: int


def read_adapter(directory: Path) -> AdapterFiles:
    weights, config_file = directory / WEIGHTS, directory / CONFIG
    for file in (weights, config_file):
        if not file.is_file():
            raise BadRequest(
                f"The adapter directory has no {file.name}.",
                next_step="Give a directory in PEFT layout; pickled weights are not read.",
                param="lora_path",
                code="invalid_adapter",
            )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        rank = int(config["r"])
    except (ValueError, KeyError, TypeError):
        raise BadRequest(
            f"{CONFIG} is not a LoRA configuration with a rank `r`.",
            next_step="Save the adapter with PEFT and try again.",
            param="lora_path",
            code="invalid_adapter",
        ) from None
    if rank < 1:
        raise BadRequest(f"{CONFIG} says rank {rank}.", param="lora_path", code="invalid_adapter")
    with weights.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return AdapterFiles(directory, digest, rank, weights.stat().st_size)
