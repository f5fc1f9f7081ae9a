"""Checkpoints whose weights are stored quantised: named and refused before weights are read."""

from collections.abc import Iterable
from typing import Any

from engine.errors import CheckpointError

# Tensors beside a quantised weight, by the suffix that the formats use.
_COMPANIONS = {
    ".weight_scale": "FP8 or INT8 (compressed-tensors)",
    ".weight_scale_inv": "block FP8",
    ".weight_packed": "compressed-tensors",
    ".input_scale": "FP8",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes INT8",
    "_blocks": "MXFP4",
}
_NEXT = "use the unquantised checkpoint, or a GGUF file"


def refuse_quantised(raw: dict[str, Any]) -> None:
    """Raises CheckpointError naming the format that config.json declares."""
    declared = raw.get("quantization_config") or raw.get("compression_config")
    if not declared:
        return
    raise CheckpointError(
        f"config.json: the weights are quantised as {_format_of(declared)}, which is not supported: "
        f"{_NEXT}"
    )


def refuse_companions(names: Iterable[str]) -> None:
    """Raises CheckpointError naming the tensor that only a quantised checkpoint has."""
    for name in sorted(names):
        for suffix, label in _COMPANIONS.items():
            if name.endswith(suffix):
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
