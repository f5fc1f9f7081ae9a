"""Reads what `config.json` says of several residual streams and of sparse gates."""

from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import StreamsSpec
from engine.models.config_values import positive, within


def streams_spec(raw: dict[str, Any]) -> StreamsSpec:
    count = positive(raw, "altup_num_inputs", 4)
    return StreamsSpec(
        count=count,
        active=within(raw, "altup_active_idx", count),
        scaled=bool(raw.get("altup_correct_scale", True)),
        rank=positive(raw, "laurel_rank", 64),
        inputs=positive(raw, "hidden_size_per_layer_input", 256),
        vocab=positive(raw, "vocab_size_per_layer_input", 262144),
    )


def inner_size(raw: dict[str, Any]) -> Any:
    """Of all layers alike."""
    given = raw["intermediate_size"]
    sizes = given if isinstance(given, list) else [given]
    if len(set(sizes)) != 1:
        raise CheckpointError(
            f"config.json: intermediate_size is {given}: layers of different sizes are not supported"
        )
    return sizes[0]


def sparsity(raw: dict[str, Any], layers: int) -> tuple[float, ...]:
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
