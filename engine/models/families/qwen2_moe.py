"""Qwen 1.5 and 2 MoE: Qwen2's block with a mixture of experts, one of which every token uses."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ExpertsSpec, ModelSpec
from engine.models.config_values import base_spec, chosen_experts, layer_windows, positive

ARCHITECTURE = "Qwen2MoeForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    base = base_spec(raw)
    first = raw.get("max_window_layers", 28)
    slides = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    lower = [slides and layer % 2 == 0 and layer < first for layer in range(base.layers)]
    experts = mixture(raw, base.layers, 60, 4)
    shared = positive(raw, "shared_expert_intermediate_size", 5632)
    return replace(base, windows=layer_windows(raw, lower), experts=replace(experts, shared=shared))


def mixture(raw: dict[str, Any], layers: int, count: int, active: int) -> ExpertsSpec:
    """`count` and `active` are the family's defaults. The layers `mlp_only_layers`, and all but each
    `decoder_sparse_step`-th one, have an MLP of `intermediate_size`."""
    count = positive(raw, "num_experts", positive(raw, "num_local_experts", count))
    step = positive(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or ()
    return ExpertsSpec(
        count=count,
        active=chosen_experts(raw, count, active),
        intermediate=positive(raw, "moe_intermediate_size"),
        layers=frozenset(n for n in range(layers) if n not in dense and (n + 1) % step == 0),
        normed=bool(raw.get("norm_topk_prob", False)),
    )
