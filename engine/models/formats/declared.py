"""What `quantization_config` says of weights by GPTQ and AWQ. Needs no torch."""

from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError

_BITS = {"gptq": (4, 8), "awq": (4,)}
_PACKING = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_NEXT = "use the unquantised checkpoint, or a GGUF file"


@dataclass(frozen=True, slots=True)
class Grouped:
    """Integer codes with a scale and a zero point for each group of inputs."""

    method: str  # gptq or awq
    bits: int
    group: int | None  # inputs that share a scale; None: all of them
    symmetric: bool  # all zero points are the middle
    by_activation: bool  # inputs were sorted into groups: `g_idx` says which
    less_one: bool  # zero points are stored less one


def grouped(raw: dict[str, Any]) -> Grouped | None:
    """None for another format. Raises CheckpointError naming what is not supported."""
    declared = raw.get("quantization_config")
    if not isinstance(declared, dict) or declared.get("quant_method") not in _BITS:
        return None
    method = declared["quant_method"]
    bits: Any = declared.get("bits", declared.get("w_bit"))
    group = declared.get("group_size", declared.get("q_group_size", 128))
    names = ("checkpoint_format", "format") if method == "gptq" else ("version", "format")
    packing = next((declared[name] for name in names if declared.get(name)), _PACKING[method][0])
    own = [name for name in declared.get("dynamic") or () if not str(name).startswith("-:")]
    for wrong, words in (
        (bits not in _BITS[method], f"{bits} bits"),
        (not isinstance(group, int) or group == 0 or group < -1, f"a group size of {group!r}"),
        (str(packing).lower() not in _PACKING[method], f"the packing {packing!r}"),
        (bool(declared.get("is_marlin_format")), "the packing 'marlin'"),
        (bool(own), f"settings of their own for {', '.join(map(str, own))}"),
    ):
        if wrong:
            raise CheckpointError(
                f"config.json: weights quantised as {method} with {words} are not supported: {_NEXT}"
            )
    middle = (
        declared.get("sym", False) if method == "gptq" else not declared.get("zero_point", True)
    )
    return Grouped(
        method=method,
        bits=bits,
        group=None if group == -1 else group,
        symmetric=bool(middle),
        by_activation=method == "gptq" and bool(declared.get("desc_act")),
        less_one=method == "gptq" and str(packing).lower() == "gptq",
    )
