"""What `adapter_config.json` may say. No torch: gateways check uploads with it."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from engine.adapters.digest import REFUSED
from engine.adapters.peft.patterns import problem_of, value_of
from engine.errors import AdapterError
from engine.json_fields import FLAG, TEXT, Fields, either, every, shown
from engine.json_fields import problem_of as field_problem

# Ways to begin training that replace the base model's weights by what the adapter leaves of them.
_CHANGED_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_FIELDS: Fields = {
    "peft_type": TEXT,
    "bias": TEXT,
    "target_modules": either(TEXT, every(TEXT)),
    "modules_to_save": every(TEXT),
    "init_lora_weights": either(FLAG, TEXT),
    "use_rslora": FLAG,
    "use_dora": FLAG,
}
_BIASES = ("none", "all", "lora_only")


def refuse_unserved(path: Path, config: dict[str, Any]) -> None:
    """Raises AdapterError naming the field of `config`, which was read from `path`, that no base
    model is served with."""
    problem = field_problem(config, _FIELDS)
    if problem:
        raise invalid(path, problem)
    if config.get("peft_type", "LORA") != "LORA":
        raise invalid(path, f"peft_type is {shown(config['peft_type'])}: only LORA is supported")
    if config.get("bias", "none") not in _BIASES:
        raise invalid(path, f"bias is {shown(config['bias'])}: supported are {', '.join(_BIASES)}")
    for field in REFUSED:
        if config.get(field):
            raise invalid(path, f"{field} is set, which is not supported: train without it")
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_CHANGED_BASE):
        raise invalid(
            path,
            f"init_lora_weights is {shown(begin)}, which changes the base model: save the adapter with "
            "path_initial_model_for_weight_conversion",
        )
    problem = problem_of(config)
    if problem:
        raise invalid(path, problem)


def check_config(path: Path, config: dict[str, Any], max_rank: int) -> None:
    """Raises AdapterError naming the field that is not served, missing or out of range."""
    refuse_unserved(path, config)
    if "peft_type" not in config:
        raise invalid(path, "peft_type is None: only LORA is supported")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
        raise invalid(path, f"r is {shown(rank)}: it must be from 1 to {max_rank}")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or not abs(alpha) <= 1e6:
        raise invalid(path, f"lora_alpha is {shown(alpha)}: it must be from -1000000 to 1000000")


def check_modules(path: Path, config: dict[str, Any], modules: Collection[str]) -> None:
    """`modules`: the names that the base model has. A list of targets names them or their ends."""
    known = {name.split(".")[-1] for name in modules}
    for field in ("target_modules", "modules_to_save"):
        targets = config.get(field)
        supported = known if field == "target_modules" else {n for n in modules if "." not in n}
        if isinstance(targets, list):
            unknown = sorted(t for t in targets if str(t).split(".")[-1] not in supported)
            if unknown:
                raise invalid(
                    path,
                    f"{field} has {shown(unknown[0])}: supported are {', '.join(sorted(supported))}",
                )


def scale_of(config: dict[str, Any], module: str, rank: int, path: Path) -> float:
    """What the product of a module's matrices of this rank is multiplied by. `module`: its full name
    in the base model. Raises AdapterError where the configuration gives it another rank."""
    alpha = value_of(config.get("alpha_pattern"), module, config["lora_alpha"])
    configured_rank = value_of(config.get("rank_pattern"), module, config["r"])
    if configured_rank != rank:
        raise invalid(
            path, f"the configuration gives {module} rank {configured_rank}, its weights {rank}"
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def invalid(path: Path, message: str) -> AdapterError:
    return AdapterError("invalid_adapter", f"{path}: {message}")
