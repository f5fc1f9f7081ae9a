"""Reads the values of `config.json` that families share, and names those that are wrong."""

import math
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec, RopeSpec


def base_spec(raw: dict[str, Any]) -> ModelSpec:
    """The fields that every family reads in the same way; the others have Llama's values."""
    heads = positive(raw, "num_attention_heads")
    kv_heads = positive(raw, "num_key_value_heads", heads)
    hidden = positive(raw, "hidden_size")
    head_dim = positive(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads ({heads}) is not a multiple of "
            f"num_key_value_heads ({kv_heads})"
        )
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim is {head_dim}: rotary needs an even size")
    layers = positive(raw, "num_hidden_layers")
    return ModelSpec(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=positive(raw, "intermediate_size"),
        vocab=positive(raw, "vocab_size"),
        context=positive(raw, "max_position_embeddings"),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        eos=eos_ids(raw.get("eos_token_id")),
        rope=rope_spec(raw, head_dim),
        windows=(None,) * layers,
        activation=_activation(raw),
        query_scale=head_dim**-0.5,
    )


def layer_windows(raw: dict[str, Any], default: list[bool]) -> tuple[int | None, ...]:
    """Each layer's window. `default`: which layers slide if config.json has no layer_types."""
    window = raw.get("sliding_window")
    types = raw.get("layer_types")
    slides = [kind == "sliding_attention" for kind in types] if types else default
    if len(slides) != raw["num_hidden_layers"]:
        raise CheckpointError(
            f"config.json: layer_types has {len(slides)} entries for "
            f"{raw['num_hidden_layers']} layers"
        )
    if any(slides) and (not isinstance(window, int) or window < 1):
        raise CheckpointError(f"config.json: sliding_window is {window!r}: it must be above 0")
    return tuple(window if slide else None for slide in slides)


def positive(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: {name} is {value!r}: it must be a whole number above 0"
        )
    return value


def within(raw: dict[str, Any], name: str, end: int) -> int:
    """A whole number from 0 to below `end`; 0 where there is none."""
    value = raw.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < end:
        raise CheckpointError(f"config.json: {name} is {value!r}: it must be from 0 to {end - 1}")
    return value


def chosen_experts(raw: dict[str, Any], count: int, default: int) -> int:
    """How many of `count` experts a token uses."""
    active = positive(raw, "num_experts_per_tok", default)
    if active > count:
        raise CheckpointError(f"config.json: num_experts_per_tok is {active}, of {count} experts")
    return active


def positive_number(raw: dict[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} is {value!r}: it must be a number above 0")
    return float(value)


def eos_ids(value: Any) -> tuple[int, ...]:
    """The end ids of a configuration value: null, one id, or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _activation(raw: dict[str, Any]) -> str:
    name = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise CheckpointError(f"config.json: hidden_act is {name!r}: use {', '.join(known)}")
    return known[name]


_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "divided": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def rope_spec(raw: dict[str, Any], head_dim: int, *, partly: bool = False) -> RopeSpec:
    """`partly`: whether the family rotates a part of each head where the config says so."""
    values = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_NEEDS:
        raise CheckpointError(
            f"config.json: rope type is {kind!r}: supported are {', '.join(sorted(_ROPE_NEEDS))}"
        )
    rotated = _rotated(raw, values, head_dim, partly)
    if kind == "longrope":
        _read_longrope(raw, values, rotated // 2)
    for name in _ROPE_NEEDS[kind]:
        if not isinstance(values.get(name), int | float) or values[name] <= 0:
            raise CheckpointError(f"config.json: rope {kind} needs {name} above 0")
    if kind == "divided" and len(values.get("divisors") or ()) != head_dim // 2:
        raise CheckpointError(f"config.json: rope divided needs {head_dim // 2} divisors")
    theta = values.get("rope_theta", raw.get("rope_theta", 10000.0))
    return RopeSpec(float(theta), kind, values, None if rotated == head_dim else rotated)


def _rotated(raw: dict[str, Any], values: dict[str, Any], head_dim: int, partly: bool) -> int:
    """How many values of a head are rotated."""
    share = values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if share == 1.0:
        return head_dim
    if not partly:
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
    rotated = int(head_dim * share) if isinstance(share, int | float) and 0 < share < 1 else 0
    if not rotated or rotated % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor is {share!r}: it must leave an even number of a head's "
            f"{head_dim} values, above 0"
        )
    return rotated


def _read_longrope(raw: dict[str, Any], values: dict[str, Any], count: int) -> None:
    """Checks the factors; the original context may be a sibling of the scaling."""
    original = "original_max_position_embeddings"
    values[original] = values.get(original) or raw.get(original)
    for name in ("short_factor", "long_factor"):
        found = values.get(name)
        if (
            not isinstance(found, list)
            or len(found) != count
            or not all(isinstance(each, int | float) and 0 < each < math.inf for each in found)
        ):
            raise CheckpointError(
                f"config.json: rope longrope needs {count} numbers above 0 in {name}"
            )
