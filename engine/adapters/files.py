"""Reads one LoRA adapter in PEFT layout and refuses what does not fit the base model."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.adapters.digest import CONFIG, WEIGHTS, digest_of, read_config
from engine.adapters.peft.config import check_config, check_modules, invalid
from engine.adapters.peft.keys import read_tensors
from engine.adapters.peft.modules import all_modules, inner_modules, layer_modules
from engine.adapters.peft.names import HEAD, TABLE
from engine.adapters.peft.reading import Reading
from engine.backends.layers.adapter_extras import AdapterExtras, Pair
from engine.backends.layers.matrices import own_name
from engine.errors import CheckpointError
from engine.models.base_weights import BaseWeights
from engine.regular_files import open_regular


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's matrices by (layer, part): A [rank, in] and B transposed and scaled,
    [rank, out]; in the compute dtype, or in a half type that widens to the same values."""

    digest: str
    rank: int  # the largest of its matrices' ranks
    matrices: dict[tuple[int, str], Pair]
    extras: AdapterExtras | None = None


def read_adapter(
    directory: Path,
    base: BaseWeights,
    dtype: torch.dtype,
    max_rank: int,
    known_digest: str | None = None,
) -> AdapterWeights:
    """Reads and checks the PEFT directory `directory`.

    A `known_digest` says that these files were verified before: they are neither hashed nor
    checked for finite values again. Raises AdapterError naming the file and field at fault.
    """
    spec, config, path = base.spec, read_config(directory), directory / WEIGHTS
    check_config(directory / CONFIG, config, max_rank)
    parts, inner = layer_modules(spec), inner_modules(spec)
    ends = [own_name(spec, f"model.{TABLE}.").split(".")[-2], HEAD]
    check_modules(
        directory / CONFIG, config, [*(own_name(spec, each) for each in (*parts, *inner)), *ends]
    )
    try:
        with open_regular(path) as weights:
            file = weights.read()
    except OSError as error:
        raise invalid(path, f"it cannot be read: {error}") from None
    found = read_tensors(path, file, spec, all_modules(spec))
    for name, module in zip(ends, (TABLE, HEAD), strict=True):
        saved = "whole" in found.get((None, module), {})
        if name in (config.get("modules_to_save") or ()) and not saved:
            raise invalid(
                directory / CONFIG, f"modules_to_save has {name!r}, which is not in {WEIGHTS}"
            )
    reading = Reading(directory, config, base, dtype, max_rank, known_digest is None)
    try:
        for (layer, module), each in found.items():
            if layer is not None and module in inner:
                reading.inner_module(layer, module, inner[module], each)
            elif layer is not None:
                reading.layer_module(layer, module, parts[module], each)
        table, head = reading.table(found.get((None, TABLE))), reading.head(found.get((None, HEAD)))
    except CheckpointError as error:
        raise invalid(path, f"the base model cannot be read: {error.message}") from None
    matrices, extras = reading.matrices, reading.extras(table, head)
    if not matrices and extras is None:
        raise invalid(path, "it has no lora_A and lora_B matrices")
    rank = max((a.shape[0] for a, _ in matrices.values()), default=1)
    digest = known_digest or digest_of(config, hashlib.sha256(file).digest())
    return AdapterWeights(digest, rank, matrices, extras)
