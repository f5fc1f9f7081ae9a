"""gpt-oss: attention with sinks and alternating windows, and clamped experts with biases."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ExpertsSpec, ModelSpec
from engine.models.config_values import (
    base_spec,
    chosen_experts,
    layer_windows,
    positive,
    positive_number,
)

ARCHITECTURE = "GptOssForCausalLM"
# What configurations leave out, as OpenAI's own do.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = _DEFAULTS | raw
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw |= {"rope_parameters": _YARN}
    base = base_spec(raw)
    count = positive(raw, "num_local_experts", 128)
    experts = ExpertsSpec(
        count=count,
        active=chosen_experts(raw, count, 4),
        intermediate=base.intermediate,
        layers=frozenset(range(base.layers)),
        router="router",
        stacked=True,
        clamp=(
            positive_number(raw, "swiglu_alpha", 1.702),
            positive_number(raw, "swiglu_limit", 7.0),
        ),
    )
    windows = layer_windows(raw, [layer % 2 == 0 for layer in range(base.layers)])
    return replace(base, windows=windows, sinks=True, experts=experts)
