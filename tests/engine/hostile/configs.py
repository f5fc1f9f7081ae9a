"""`config.json` and `generation_config.json`: every field of every family, as transformers' own classes
know them, and those of scalings and quantised weights."""

import json
import random
from pathlib import Path
from typing import Any

from engine.models.config_fields import FIELDS
from engine.models.registry import FAMILIES
from tests.engine.hostile.case import Case, Draw
from tests.engine.hostile.odd_values import (
    BROKEN,
    at,
    changed,
    odd,
    places,
    shown,
    without,
    written,
)

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7, "attention_factor": 1.1, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
     "original_max_position_embeddings": 64, "attention_factor": None},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4},
     "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
)  # fmt: skip
_QUANTISED: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
     "damp_percent": 0.01, "checkpoint_format": "gptq", "dynamic": {}},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
     "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3",
     "activation_scheme": "dynamic", "modules_to_not_convert": None},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
     "quantization_status": "compressed", "kv_cache_scheme": None, "config_groups": {"group_0": {
         "targets": ["Linear"], "input_activations": None, "weights": {
             "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
             "actorder": None, "dynamic": False}}}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
)  # fmt: skip
_SAMPLING: dict[str, Any] = {
    "eos_token_id": [2, 5], "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05,
    "repetition_penalty": 1.1, "do_sample": True, "bos_token_id": 1, "pad_token_id": 0,
    "max_new_tokens": 20, "transformers_version": "5.0",
}  # fmt: skip


def config_cases(bases: Path, seed: int) -> Draw:
    """Fields come by turns, so that every field of every family has its case."""
    whole = {name: json.loads((bases / name / _CONFIG).read_text()) for name in sorted(FAMILIES)}
    turns = [(name, path) for name, config in whole.items() for path in places(config)]
    random.Random(seed).shuffle(turns)
    taken = iter(range(1 << 62))

    def _draw(draw: random.Random) -> Case:
        kind = draw.random()
        if kind < 0.75:
            family, path = turns[next(taken) % len(turns)]
            return _of_field(draw, bases / family, whole[family], path)
        family = draw.choice(list(whole))
        config = whole[family]
        if kind < 0.85:
            name, tree = _with_scaling(draw, config)
            return _case(f"{family} {name}", bases / family, tree)
        if kind < 0.92:
            chosen = {"quantization_config": draw.choice(_QUANTISED)}
            name, tree = _mutated(draw, chosen, draw.choice(places(chosen)))
            return _case(f"{family} {name}", bases / family, config | tree)
        if kind < 0.97:
            name, tree = _mutated(draw, _SAMPLING, (draw.choice(list(_SAMPLING)),))
            files = {_GENERATION: written(tree)}
            return Case(f"{family} {_GENERATION} {name}", bases / family, files, set(_SAMPLING))
        file = draw.choice((_CONFIG, _GENERATION))
        name = draw.choice(list(BROKEN))
        return Case(f"{family} {file} is {name}", bases / family, {file: BROKEN[name]}, ())

    return _draw


def _of_field(
    draw: random.Random, base: Path, config: dict[str, Any], path: tuple[str | int, ...]
) -> Case:
    if draw.random() < 0.05:
        field, value = str(path[0]), odd(draw, config.get(str(path[0])))
        text = written(config, first=(field, value))
        return Case(f"{base.name} {field} twice", base, {_CONFIG: text}, _names(config))
    name, tree = _mutated(draw, config, path)
    if draw.random() < 0.15:  # together with another
        other = draw.choice(places(tree) or [path])
        more, tree = _mutated(draw, tree, other)
        name = f"{name}, {more}"
    return _case(f"{base.name} {name}", base, tree)


def _mutated(
    draw: random.Random, tree: dict[str, Any], path: tuple[str | int, ...]
) -> tuple[str, dict[str, Any]]:
    label = ".".join(map(str, path))
    if draw.random() < 0.12:
        return f"{label} absent", without(tree, path)
    value = odd(draw, at(tree, path))
    return f"{label} = {shown(value)}", changed(tree, path, value)


def _with_scaling(draw: random.Random, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    field = draw.choice(("rope_scaling", "rope_parameters"))
    chosen = {field: draw.choice(_SCALINGS)}
    name, tree = _mutated(draw, chosen, draw.choice(places(chosen)))
    if "text_config" in config:
        return name, config | {"text_config": config["text_config"] | tree}
    return name, config | tree


def _case(name: str, base: Path, tree: dict[str, Any]) -> Case:
    names = _names(tree) | _names(json.loads((base / _CONFIG).read_text()))
    return Case(
        name, base, {_CONFIG: written(tree)}, names, places=frozenset(("model.safetensors", "case"))
    )


def _names(tree: Any) -> set[str]:
    """Of fields, and of parts of tensors' names, which a shape that does not fit is told by."""
    found = {*FIELDS, "weight", "lm_head.weight", "rope", "rope type"}
    if isinstance(tree, dict):
        found |= {str(path[-1]) for path in places(tree) if isinstance(path[-1], str)}
    return {each for each in found if each}
