"""What `quantization_config` says of weights by GPTQ and AWQ, and in FP8. Needs no torch."""

from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError

_BITS = {"gptq": (4, 8), "awq": (4,)}
_PACKING = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
Blocks = tuple[tuple[int, int], ...]  # the outputs and inputs that share a scale
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
                f"config.json: quantization_config: weights as {method} with {words} are not supported: "
                f"{_NEXT}"
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


def float8(raw: dict[str, Any]) -> Blocks | None:
    """None for another format. Raises CheckpointError naming what is not supported."""
    declared = raw.get("quantization_config") or raw.get("compression_config")
    if not isinstance(declared, dict):
        return None
    method = declared.get("quant_method")
    if method == "compressed-tensors" and declared.get("format") == "float-quantized":
        return _float_groups(declared.get("config_groups"))
    if method not in ("fp8", "fbgemm_fp8"):
        return None
    form = declared.get("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(
            f"config.json: quantization_config: weights as fp8 in {form!r} are not supported: {_NEXT}"
        )
    size = declared.get("weight_block_size")
    return (_block(size),) if size else ()


def _float_groups(groups: Any) -> Blocks:
    blocks = []
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        weights = group.get("weights") or {}
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            raise CheckpointError(
                f"config.json: {name} of quantization_config has weights of type "
                f"{weights.get('type')!r} in {weights.get('num_bits')} bits, which float-quantized is "
                f"not read with: {_NEXT}"
            )
        if weights.get("strategy") == "block":
            blocks.append(_block(weights.get("block_structure")))
        if weights.get("strategy") == "group":
            blocks.append(_block([1, weights.get("group_size")]))
    return tuple(dict.fromkeys(blocks))


def _block(size: Any) -> tuple[int, int]:
    """From a list, or "128x128"."""
    given = size.split("x") if isinstance(size, str) else size
    try:
        rows, columns = map(int, given)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise CheckpointError(
            f"config.json: quantization_config has blocks of {size!r}, not two sizes above 0: {_NEXT}"
        )
    return rows, columns
