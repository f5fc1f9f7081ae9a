"""The types and ranges of the fields of `config.json` that families read: one table for all.

A value that no model can have is refused here, with the field's name, before a family reads it.
"""

import math
from collections.abc import Callable
from typing import Any

from engine.errors import CheckpointError

_MOST_LAYERS = 10_000
_MOST = 2**31 - 1
_Check = Callable[[Any], bool]


def _whole(first: int, last: int = _MOST) -> tuple[str, _Check]:
    def _holds(value: Any) -> bool:
        return type(value) is int and first <= value <= last

    return f"a whole number from {first} to {last}", _holds


def _number(above: float, most: float = math.inf) -> tuple[str, _Check]:
    def _holds(value: Any) -> bool:
        return type(value) in (int, float) and above < value <= most and math.isfinite(value)

    limit = f" and at most {most}" if math.isfinite(most) else ""
    return f"a finite number above {above}{limit}", _holds


def _every(kind: tuple[str, _Check]) -> tuple[str, _Check]:
    return (
        f"a list of which each is {kind[0]}",
        lambda value: isinstance(value, list) and all(map(kind[1], value)),
    )


def _either(first: tuple[str, _Check], second: tuple[str, _Check]) -> tuple[str, _Check]:
    return f"{first[0]}, or {second[0]}", lambda value: first[1](value) or second[1](value)


_TEXT: tuple[str, _Check] = "a text", lambda value: isinstance(value, str)
_OBJECT: tuple[str, _Check] = "an object", lambda value: isinstance(value, dict)
_SIZE, _COUNT, _LAYERS = _whole(1), _whole(0), _whole(1, _MOST_LAYERS)
_SMALL, _POSITIVE = _number(0, 1), _number(0)
_ID = _whole(0)
FIELDS: dict[str, tuple[str, _Check]] = {
    "architectures": _every(_TEXT),
    "model_type": _TEXT,
    "text_config": _OBJECT,
    "attn_config": _OBJECT,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "eos_token_id": _either(_ID, _every(_ID)),
    "layer_types": _every(_TEXT),
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "mlp_only_layers": _every(_COUNT),
    "activation_sparsity_pattern": _every(("a share", lambda v: type(v) in (int, float))),
    "intermediate_size": _either(_SIZE, _every(_SIZE)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(
        ("hidden_size", "n_embed", "d_model", "num_attention_heads", "n_head", "n_heads",
         "num_key_value_heads", "num_kv_heads", "head_dim", "vocab_size", "sliding_window_pattern",
         "max_position_embeddings", "seq_length", "max_seq_len"),
        _SIZE,
    ),
    **dict.fromkeys(
        ("sliding_window", "max_window_layers", "first_k_dense_replace", "n_shared_experts",
         "num_kv_shared_layers"),
        _COUNT,
    ),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _SMALL),
    **dict.fromkeys(
        ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
         "final_logit_softcapping", "logit_scale"),
        _POSITIVE,
    ),
}  # fmt: skip
_ROPE: dict[str, tuple[str, _Check]] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    **dict.fromkeys(
        ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor",
         "beta_fast", "beta_slow", "original_max_position_embeddings"),
        _POSITIVE,
    ),
}  # fmt: skip


def check_fields(raw: dict[str, Any], prefix: str = "") -> None:
    """Raises CheckpointError naming the first field whose value no model can have. A null stands for
    the family's default."""
    _check(raw, FIELDS, prefix)
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name) or {}
        by_kind = {kind: part for kind, part in given.items() if isinstance(part, dict)}
        for kind, part in (by_kind or {"": given}).items():
            _check(part, _ROPE, f"{prefix}{name}.{kind}." if kind else f"{prefix}{name}.")
    if raw.get("text_config"):
        check_fields(raw["text_config"], f"{prefix}text_config.")
    vocab, ends = raw.get("vocab_size"), raw.get("eos_token_id")
    for end in ends if isinstance(ends, list) else [ends]:
        if vocab is not None and end is not None and end >= vocab:
            raise CheckpointError(
                f"config.json: {prefix}eos_token_id is {end}: the vocabulary ends at {vocab - 1}"
            )


def _check(raw: dict[str, Any], fields: dict[str, tuple[str, _Check]], prefix: str) -> None:
    for name, value in raw.items():
        if value is None or name not in fields:
            continue
        kind, holds = fields[name]
        if not holds(value):
            shown = repr(value)
            shown = shown if len(shown) < 200 else f"{shown[:200]}..."
            raise CheckpointError(f"config.json: {prefix}{name} is {shown}: it must be {kind}")
