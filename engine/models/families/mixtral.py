"""Mixtral: Mistral's block with a mixture of experts in every layer."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ExpertsSpec, ModelSpec
from engine.models.config_values import chosen_experts, positive
from engine.models.families import mistral

ARCHITECTURE = "MixtralForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    base = mistral.spec({"rms_norm_eps": 1e-5, "rope_theta": 1000000.0} | raw)
    count = positive(raw, "num_local_experts", 8)
    experts = ExpertsSpec(
        count=count,
        active=chosen_experts(raw, count, 2),
        intermediate=base.intermediate,
        layers=frozenset(range(base.layers)),
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return replace(base, experts=experts)
