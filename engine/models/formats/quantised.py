"""Checkpoints whose weights are stored quantised: named and refused before weights are read."""

from collections.abc import Iterable
from typing import Any

from engine.errors import CheckpointError
from engine.models.formats.declared import float8, grouped

# Tensors that belong to a quantised weight, by the suffix that the formats use.
_COMPANIONS = {
    ".weight_scale": "FP8 or INT8 (compressed-tensors)",
    ".weight_scale_inv": "block FP8",
    ".weight_packed": "compressed-tensors",
    ".weight_g_idx": "act-order",
    ".input_scale": "FP8",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes INT8",
    "_blocks": "MXFP4",
}
# Of them, those of the formats that are read.
COMPRESSED = (".weight_scale", ".weight_packed", ".weight_g_idx", ".input_scale")
MXFP4 = ("_blocks",)
FLOAT8 = (".weight_scale", ".weight_scale_inv", ".input_scale")
GROUPED = (".qweight", ".qzeros")
_FORMATS = ("pack-quantized", "int-quantized")
_NEXT = "use the unquantised checkpoint, or a GGUF file"


def refuse_quantised(raw: dict[str, Any]) -> None:
    """Raises CheckpointError naming the format that config.json declares."""
    declared = raw.get("quantization_config") or raw.get("compression_config")
    if not declared or is_compressed(raw) or is_mxfp4(raw):
        return
    if grouped(raw) is not None or float8(raw) is not None:
        return
    raise CheckpointError(
        f"config.json: by its quantization_config the weights are quantised as {_format_of(declared)}, "
        f"which is not supported: {_NEXT}"
    )


def is_compressed(raw: dict[str, Any]) -> bool:
    """Whether it is stored in a format of compressed-tensors that is read.

    Raises CheckpointError naming what a scheme of such a format asks beyond that.
    """
    declared = raw.get("quantization_config") or raw.get("compression_config")
    if not isinstance(declared, dict) or declared.get("quant_method") != "compressed-tensors":
        return False
    if declared.get("format") not in _FORMATS:
        return False
    groups = declared.get("config_groups")
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        weights, rows = (group.get(part) or {} for part in ("weights", "input_activations"))
        for wrong, words in (
            (weights.get("type", "int") != "int", f"weights of type {weights.get('type')!r}"),
            (weights.get("num_bits") not in (4, 8), f"{weights.get('num_bits')} bits"),
            (rows.get("num_bits", 8) != 8, f"activations of {rows.get('num_bits')} bits"),
        ):
            if wrong:
                raise CheckpointError(
                    f"config.json: {name} of quantization_config has {words}, which is not supported: "
                    f"{_NEXT}"
                )
    return True


def is_sorted(raw: dict[str, Any]) -> bool:
    """Whether compressed-tensors sorted the inputs of each matrix into groups (act-order)."""
    groups = (raw.get("quantization_config") or raw["compression_config"]).get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    return any((each.get("weights") or {}).get("actorder") in ("group", True) for each in schemes)


def rounds_rows(raw: dict[str, Any]) -> bool:
    """Whether all matrices of it are meant for rows of 8 bits (W8A8). Declared scales of rows are never
    used: each row is rounded by its own, which is nearer."""
    declared = raw.get("quantization_config") or raw["compression_config"]
    if declared.get("quant_method") != "compressed-tensors":
        return True  # the FP8 of DeepSeek and of FBGEMM
    groups = declared.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    return bool(schemes) and all(each.get("input_activations") for each in schemes)


def is_mxfp4(raw: dict[str, Any]) -> bool:
    """Whether its experts are stored in MXFP4, as gpt-oss is published."""
    declared = raw.get("quantization_config")
    if not isinstance(declared, dict) or declared.get("quant_method") != "mxfp4":
        return False
    return "GptOssForCausalLM" in (raw.get("architectures") or ())


def refuse_companions(names: Iterable[str], allowed: tuple[str, ...] = ()) -> None:
    """Raises CheckpointError naming the tensor that only a quantised checkpoint has, except for the
    endings that are `allowed`."""
    for name in sorted(names):
        for suffix, label in _COMPANIONS.items():
            if name.endswith(suffix) and suffix not in allowed:
                raise CheckpointError(
                    f"tensor {name} belongs to weights quantised as {label}, which is not supported: "
                    f"{_NEXT}"
                )


def _format_of(declared: Any) -> str:
    if not isinstance(declared, dict):
        return repr(declared)
    method = str(declared.get("quant_method") or "an unnamed format")
    detail = declared.get("fmt") or declared.get("format")
    bits = declared.get("bits") or (4 if declared.get("load_in_4bit") else None)
    bits = bits or (8 if declared.get("load_in_8bit") else None)
    parts = [method, str(detail) if detail else "", f"{bits} bits" if bits else ""]
    return ", ".join(part for part in parts if part)
