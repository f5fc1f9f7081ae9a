"""Gemma 3n: several residual streams, inputs of each layer's own, gates of which few are above 0, and
last layers that read the keys and values of earlier ones."""

from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec, StreamsSpec
from engine.models.config_values import base_spec, layer_windows, positive, rope_spec
from engine.models.families.gemma3 import rotations

ARCHITECTURE = "Gemma3nForCausalLM"
# What configurations leave out, as Google's own do.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "eos_token_id": 1,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768,
    "sliding_window": 512, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15, "altup_active_idx": 0, "altup_correct_scale": True,
}  # fmt: skip


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = _DEFAULTS | raw
    whole, local = rotations(raw)
    base = base_spec(raw | {"rope_parameters": whole, "intermediate_size": _inner_size(raw)})
    count = positive(raw, "altup_num_inputs", 4)
    windows = layer_windows(raw, [(layer + 1) % 5 != 0 for layer in range(base.layers)])
    shared = _whole_number(raw, "num_kv_shared_layers", base.layers)
    if set(windows) != set(windows[: base.layers - shared]):
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {shared}: the layers before have no keys and "
            "values of one of their kinds"
        )
    return replace(
        base,
        local_rope=rope_spec(raw | {"rope_parameters": local}, base.head_dim),
        windows=windows,
        shared_layers=shared,
        query_scale=1.0,
        head_norm=True,
        value_norm=True,
        norms_after=True,
        embedding_scale=base.hidden**0.5,
        rounded_embedding_scale=True,
        logit_cap=raw["final_logit_softcapping"],
        sparsity=_sparsity(raw, base.layers),
        streams=StreamsSpec(
            count=count,
            active=_whole_number(raw, "altup_active_idx", count),
            scaled=bool(raw["altup_correct_scale"]),
            rank=positive(raw, "laurel_rank", 64),
            inputs=positive(raw, "hidden_size_per_layer_input", 256),
            vocab=positive(raw, "vocab_size_per_layer_input", 262144),
        ),
    )


def _inner_size(raw: dict[str, Any]) -> Any:
    given = raw["intermediate_size"]
    sizes = given if isinstance(given, list) else [given]
    if len(set(sizes)) != 1:
        raise CheckpointError(
            f"config.json: intermediate_size is {given}: layers of different sizes are not supported"
        )
    return sizes[0]


def _whole_number(raw: dict[str, Any], name: str, end: int) -> int:
    value = raw[name]
    if not isinstance(value, int) or not 0 <= value < end:
        raise CheckpointError(f"config.json: {name} is {value!r}: it must be from 0 to {end - 1}")
    return value


def _sparsity(raw: dict[str, Any], layers: int) -> tuple[float, ...]:
    """Of each layer: the share of its gates that are 0."""
    first = 10 if layers > 10 else 0
    shares = raw.get("activation_sparsity_pattern")
    if shares is None:
        return (0.95,) * first + (0.0,) * (layers - first)
    if len(shares) != layers or not all(0 <= share < 1 for share in shares):
        raise CheckpointError(
            f"config.json: activation_sparsity_pattern is {shares}: {layers} shares below 1 are needed"
        )
    return tuple(map(float, shares))
