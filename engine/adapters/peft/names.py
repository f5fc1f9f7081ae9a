"""The names of an adapter's tensors, and what they belong to in the base model. No torch: gateways
check uploads with it."""

import re
from collections.abc import Container
from pathlib import Path

from engine.adapters.peft.config import invalid
from engine.backends.layers.matrices import MLP_SITES, MODULES, SITES
from engine.json_fields import shown_name
from engine.model_spec import ModelSpec

TABLE, HEAD = "embed_tokens", "lm_head"
_KEY = re.compile(
    # The first part is of a saved `PeftModel`: layers put into a model by themselves lack it.
    r"(?:base_model\.model\.)?(?:(?:model\.language_model|language_model\.model|language_model|model)\.)?"
    r"(?:layers\.(?P<layer>\d+)\.)?(?P<module>[\w.]+?)\."
    r"(?:(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|base_layer)"
    r"(?:\.default)?(?:\.weight)?|(?P<bias>(?:base_layer\.)?bias)|(?:modules_to_save\.default\.)?weight)"
)
# What a tensor is to its module: a half of a product, lengths of rows (DoRA), or its whole matrix;
# or "bias", in place of the base's.
_KINDS = {
    "lora_A": "A", "lora_B": "B", "lora_embedding_A": "A", "lora_embedding_B": "B",
    "lora_magnitude_vector": "magnitude", "base_layer": "base", None: "whole",
}  # fmt: skip
_EXPERT = re.compile(r"(^|\.)(experts|shared_experts?)\.")
_MLP = {MODULES[part] for site in MLP_SITES for part in SITES[site]}

Place = tuple[int | None, str]  # (layer, module), or (None, TABLE or HEAD)


def place_of(
    path: Path, key: str, spec: ModelSpec, modules: Container[str]
) -> tuple[int | None, str, str]:
    """(layer, module of `modules`, one of the values of _KINDS or "bias"). Raises AdapterError naming the
    tensor that belongs to no such module."""
    match = _KEY.fullmatch(_usual_key(spec, key))
    key = shown_name(key)
    if match is None:
        raise invalid(path, f"tensor {key} matches no linear layer of the base model")
    module, kind = match["module"], "bias" if match["bias"] else _KINDS[match["kind"]]
    layer = None if match["layer"] is None else int(match["layer"])
    whole = layer is None and module in (TABLE, HEAD) and kind != "bias"
    unknown = not whole and module not in modules
    if unknown and spec.experts is not None and _EXPERT.search(module):
        raise invalid(path, f"tensor {key}: {_unnamed(spec)}")
    if unknown or (not whole and (layer is None or kind in ("base", "whole"))):
        raise invalid(path, f"tensor {key} matches no linear layer of the base model")
    if layer is not None:
        _check_layer(path, key, spec, layer, module)
    return layer, module, kind


def _check_layer(path: Path, key: str, spec: ModelSpec, layer: int, module: str) -> None:
    if layer >= spec.layers:
        raise invalid(path, f"tensor {key}: the base model has only {spec.layers} layers")
    sparse = spec.experts_of(layer) is not None
    if module in _MLP and sparse:
        raise invalid(path, f"tensor {key}: layer {layer} of the base model has experts there")
    if _EXPERT.search(module) and not sparse:
        raise invalid(path, f"tensor {key}: layer {layer} of the base model has no experts")


def _unnamed(spec: ModelSpec) -> str:
    experts = spec.experts
    if experts is None or experts.stacked:
        return "the base model holds its experts as one tensor, which adapters cannot change"
    each = f"{experts.module}.experts.0.{experts.names[0]}"
    return f"the base model has {experts.count} experts, by names like {each}"


def _usual_key(spec: ModelSpec, key: str) -> str:
    for usual, own in spec.renamed:
        key = key.replace(own, usual)
    return key
