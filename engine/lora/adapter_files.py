"""Reads one LoRA adapter in PEFT layout and refuses what does not fit the base model."""

import hashlib
import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from engine.errors import AdapterError
from engine.layers.matrices import (
    FUSED,
    MLP_SITES,
    MODULES,
    SITES,
    fused_rows,
    own_name,
    part_shape,
)
from engine.lora.adapter_digest import CONFIG, WEIGHTS, digest_of, read_config
from engine.model_spec import ModelSpec

_KEY = re.compile(
    r"^base_model\.model\.(?:model|language_model\.model|model\.language_model)\.layers\.(\d+)\.([\w.]+)\.lora_(A|B)(?:\.default)?\.weight$"
)
_EXPERT = re.compile(r"\.(experts|shared_expert)\.")
_NO_EXPERTS = "has experts there, which adapters cannot change: train one for its attention"
_MLP = {MODULES[part] for site in MLP_SITES for part in SITES[site]}


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's matrices by (layer, part): A [rank, in] and B transposed and scaled,
    [rank, out]; in the compute dtype, or in a half type that widens to the same values."""

    digest: str
    rank: int  # the largest of its matrices' ranks
    matrices: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


def read_adapter(
    directory: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    max_rank: int,
    known_digest: str | None = None,
) -> AdapterWeights:
    """Reads and checks the PEFT directory `directory`.

    A `known_digest` says that these files were verified before: they are neither hashed nor
    checked for finite values again. Raises AdapterError naming the file and field at fault.
    """
    config = read_config(directory)
    parts = _modules(spec)
    names = [own_name(spec, module) for module in parts]
    _check_config(directory / CONFIG, config, max_rank, names)
    path = directory / WEIGHTS
    try:
        file = path.read_bytes()
    except OSError as error:
        raise _invalid(path, f"it cannot be read: {error}") from None
    matrices = {}
    for (layer, module), pair in _by_module(path, file, spec, parts).items():
        name = f"layer {layer} {module}"
        if len(pair) != 2:
            raise _invalid(path, f"{name} has lora_{next(iter(pair))} without the other half")
        rank = _check_pair(
            path, name, pair["A"], pair["B"], parts=parts[module], spec=spec, max_rank=max_rank
        )
        own = own_name(spec, f"model.layers.{layer}.{module}")
        scale = _scale(config, own, rank, directory / CONFIG)
        a, whole = pair["A"], module in spec.fused
        rows = fused_rows(spec, module) if whole else {parts[module][0]: slice(None)}
        for part, b in ((part, pair["B"][each]) for part, each in rows.items()):
            if (layer, part) in matrices:
                raise _invalid(path, f"{name} is there as a whole and in parts")
            matrices[layer, part] = (
                a.to(_storage_dtype(a.dtype, 1.0, dtype)),
                _transposed(b, scale, _storage_dtype(b.dtype, scale, dtype)),
            )
            if known_digest is None:
                _check_finite(path, name, matrices[layer, part])
    if not matrices:
        raise _invalid(path, "it has no lora_A and lora_B matrices")
    rank = max(a.shape[0] for a, _ in matrices.values())
    digest = known_digest or digest_of(config, hashlib.sha256(file).digest())
    return AdapterWeights(digest, rank, matrices)


def _modules(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The parts of each module that an adapter may target, by Llama's names."""
    left_out = set() if spec.gated else {"gate"}
    if spec.latent is not None:
        left_out |= {*SITES["qkv"], *SITES["o"]}
    single = {module: (part,) for part, module in MODULES.items() if part not in left_out}
    return single | {whole: FUSED[whole] for whole in spec.fused}


def _usual_key(spec: ModelSpec, key: str) -> str:
    for usual, own in spec.renamed:
        key = key.replace(own, usual)
    return key


def _invalid(path: Path, message: str) -> AdapterError:
    return AdapterError("invalid_adapter", f"{path}: {message}")


def _check_config(
    path: Path, config: dict[str, Any], max_rank: int, modules: Iterable[str]
) -> None:
    if config.get("peft_type") != "LORA":
        raise _invalid(path, f"peft_type is {config.get('peft_type')!r}: only LORA is supported")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
        raise _invalid(path, f"r is {rank!r}: it must be from 1 to {max_rank}")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or abs(alpha) > 1e6:
        raise _invalid(path, f"lora_alpha is {alpha!r}: it must be from -1000000 to 1000000")
    if config.get("bias", "none") != "none":
        raise _invalid(path, f"bias is {config['bias']!r}: only 'none' is supported")
    for field in (
        "use_dora",
        "fan_in_fan_out",
        "modules_to_save",
        "trainable_token_indices",
        "target_parameters",
    ):
        if config.get(field):
            raise _invalid(path, f"{field} is set: only plain LoRA on linear layers is supported")
    targets = config.get("target_modules")
    if isinstance(targets, list):
        known = {name.split(".")[-1] for name in modules}
        unknown = sorted(t for t in targets if str(t).split(".")[-1] not in known)
        if unknown:
            raise _invalid(
                path,
                f"target_modules has {unknown[0]!r}: supported are {', '.join(sorted(known))}",
            )


def _by_module(
    path: Path, file: bytes, spec: ModelSpec, modules: Container[str]
) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
    """The file's tensors by (layer, module) and half ("A" or "B")."""
    try:
        tensors = safetensors.torch.load(file)
    except (SafetensorError, KeyError) as error:
        raise _invalid(path, f"it is not a complete safetensors file: {error}") from None
    halves: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.match(_usual_key(spec, key))
        if spec.experts is not None and _EXPERT.search(key):
            raise _invalid(path, f"tensor {key}: the base model {_NO_EXPERTS}")
        if match is None or match[2] not in modules:
            raise _invalid(path, f"tensor {key} matches no linear layer of the base model")
        layer = int(match[1])
        if layer >= spec.layers:
            raise _invalid(path, f"tensor {key}: the base model has only {spec.layers} layers")
        if match[2] in _MLP and spec.experts_of(layer) is not None:
            raise _invalid(path, f"tensor {key}: layer {layer} of the base model {_NO_EXPERTS}")
        halves.setdefault((layer, match[2]), {})[match[3]] = tensor
    return halves


def _check_pair(
    path: Path,
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    parts: Sequence[str],
    spec: ModelSpec,
    max_rank: int,
) -> int:
    width = part_shape(spec, parts[0])[0]
    out = sum(part_shape(spec, part)[1] for part in parts)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != width or b.shape[0] != out:
        raise _invalid(
            path,
            f"{name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; the base model needs "
            f"[rank, {width}] and [{out}, rank]: was it trained on another base?",
        )
    rank = a.shape[0]
    if b.shape[1] != rank or not 1 <= rank <= max_rank:
        raise _invalid(
            path, f"{name} has rank {rank} in A, {b.shape[1]} in B: both must be 1 to {max_rank}"
        )
    for half, tensor in (("A", a), ("B", b)):
        if not tensor.is_floating_point():
            raise _invalid(path, f"{name} lora_{half} is {tensor.dtype}: only floats are supported")
    return rank


def _storage_dtype(stored: torch.dtype, scale: float, computed: torch.dtype) -> torch.dtype:
    """The type kept in host memory: a half type stays where scaling leaves its values exact."""
    exact = scale == 1.0 or (stored is torch.bfloat16 and math.frexp(scale)[0] == 0.5)
    return stored if computed is torch.float32 and stored.itemsize == 2 and exact else computed


def _transposed(b: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """B^T times the scale, which is applied before the values are rounded to another type."""
    # NumPy has no bfloat16, but transposes a narrow matrix three times as fast as torch.
    bits = b.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[b.itemsize])
    transposed = torch.from_numpy(np.ascontiguousarray(bits.numpy().T)).view(b.dtype)
    return transposed.to(dtype) if scale == 1.0 else transposed.float().mul_(scale).to(dtype)


def _check_finite(path: Path, name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Also finds values that overflow the compute dtype. The sum is one quick pass; only when it
    is not finite are the values checked one by one."""
    for half, tensor in zip("AB", pair, strict=True):
        total = tensor.sum(dtype=torch.float32).item()
        if not math.isfinite(total) and not torch.isfinite(tensor).all():
            raise _invalid(path, f"{name} lora_{half} has NaN or infinite values")


def _scale(config: dict[str, Any], module: str, rank: int, path: Path) -> float:
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    configured_rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    if configured_rank != rank:
        raise _invalid(
            path, f"the configuration gives {module} rank {configured_rank}, its weights {rank}"
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
