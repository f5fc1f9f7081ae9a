"""Writes a checkpoint with its layers' matrices quantised, in compressed-tensors' `pack-quantized` or, in
FP8, `float-quantized`."""

import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from engine.backends.layers.matrices import FUSED, MODULES
from engine.backends.layers.packed import GROUP
from engine.backends.layers.quantise import quantize
from engine.errors import CheckpointError, ConfigError
from engine.model_spec import ModelSpec
from engine.models.calibrate import input_weights
from engine.models.formats.compressed_tensors import PACKED, SCALE, SHAPE, ZERO, packed
from engine.models.formats.safetensors_source import SafetensorsSource
from engine.models.registry import model_spec, read_config
from engine.models.write_checkpoint import check_paths, write_beside, write_tensors

FORMATS = {"int8": 8, "int4": 4, "fp8": 8}
_FLOAT8_MOST = torch.finfo(torch.float8_e4m3fn).max
_ENDINGS = tuple(f"{module}.weight" for module in (*MODULES.values(), *FUSED))
_UNREAD = ("vision_tower.", "multi_modal_projector.")  # by this engine: left as they are
_EXPERT = re.compile(r"\.(experts\.\d+|shared_expert)\.\w+\.weight$")


def write_quantized(source: Path, target: Path, to: str, text: Path | None = None) -> int:
    """The bytes written. `target` must not exist, or be empty; embedding, head and norms stay as
    they are. `text`: what the model reads (`calibrate.py`), for int4. Raises CheckpointError or
    ConfigError."""
    if to not in FORMATS:
        raise ConfigError(f"{to!r} is not a known format: use one of {', '.join(FORMATS)}")
    check_paths(source, target)
    config = read_config(source)
    spec = model_spec(config)
    if spec.renamed or (spec.experts is not None and spec.experts.stacked):
        raise ConfigError(
            f"{source}: checkpoints of this family are not written quantised: serve it with "
            "--quantization int8 or int4, which rounds its weights when they are loaded"
        )
    if config.get("quantization_config"):
        raise CheckpointError(f"{source} is quantised already: give the checkpoint in floats")
    if text is not None and to != "int4":
        raise ConfigError(
            f"a text is of no use for {to}, whose groups keep their whole range: leave it out"
        )
    weights = {} if text is None else input_weights(source, text)
    with closing(SafetensorsSource(source)) as tensors:
        stored = (
            _stored(tensors, name, to, _inputs(weights, name, spec)).items()
            for name in tensors.names()
        )
        written = write_tensors((each for items in stored for each in items), target)
    config["quantization_config"] = declared(to)
    write_beside(source, target, config)
    return written


def declared(to: str) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    weights = {
        "num_bits": FORMATS[to],
        "type": "float" if to == "fp8" else "int",
        "symmetric": to != "int4",
        "strategy": "channel" if to == "fp8" else "group",
        "group_size": None if to == "fp8" else GROUP,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if to == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.gate$", r"re:.*\.shared_expert_gate$", "re:vision_tower.*"],
    }


def _inputs(weights: Mapping[str, torch.Tensor], name: str, spec: ModelSpec) -> torch.Tensor | None:
    """Of an expert: those of its layer, for the matrices that read them."""
    layer = _EXPERT.search(name)
    if layer is None or spec.experts is None:
        return weights.get(name)
    if name.endswith((f".{spec.experts.names[2]}.weight", ".down_proj.weight")):
        return None
    return weights.get(name[: layer.start()].rsplit(".", 1)[0])


def _stored(
    tensors: SafetensorsSource, name: str, to: str, inputs: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    stored = tensors.raw(name)
    matrix = name.endswith(_ENDINGS) or _EXPERT.search(name) is not None
    if not matrix or name.startswith(_UNREAD):
        return {name: stored}
    if stored.shape[1] % GROUP and to != "fp8":
        raise CheckpointError(
            f"{tensors.place(name)} has {stored.shape[1]} inputs, which are not whole groups of {GROUP}"
        )
    if not torch.isfinite(stored).all():
        raise CheckpointError(f"{tensors.place(name)} holds NaN or infinite values")
    if to == "fp8":
        return _in_float8(name, stored.float())
    found, bits = quantize(stored.float(), to, inputs, zero_points=True), FORMATS[to]
    middle = 1 << (bits - 1)
    scales = torch.where(found.scales > 0, found.scales, 1.0)  # of a group of zeros
    parts = {
        name + PACKED: packed(found.codes.short() - middle, bits),
        name + SHAPE: torch.tensor(stored.shape),
        name + SCALE: scales.half(),
    }
    if found.minima is not None:
        zeros = (-found.minima / scales).round().short() - middle
        parts[name + ZERO] = packed(zeros.t(), bits).t().contiguous()
    return parts


def _in_float8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """With a scale for each output, which takes the largest value to the largest of the type."""
    scales = weight.abs().amax(1, keepdim=True) / _FLOAT8_MOST
    scales = torch.where(scales > 0, scales, 1.0)  # of an output of zeros
    codes = (weight / scales).clamp(-_FLOAT8_MOST, _FLOAT8_MOST)
    return {name: codes.to(torch.float8_e4m3fn), name + SCALE: scales}
