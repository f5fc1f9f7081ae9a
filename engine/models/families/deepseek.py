"""DeepSeek V2 and V3: latent attention, and experts chosen within groups, and shared ones."""

import math
from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ExpertsSpec, LatentSpec, ModelSpec
from engine.models.config_values import base_spec, chosen_experts, positive, positive_number


def deepseek_spec(raw: dict[str, Any], sigmoid: bool) -> ModelSpec:
    """`sigmoid`: experts are chosen as V3 does."""
    latent = LatentSpec(
        latent=positive(raw, "kv_lora_rank", 512),
        rotated=positive(raw, "qk_rope_head_dim", 64),
        plain=positive(raw, "qk_nope_head_dim", 128),
        value=positive(raw, "v_head_dim", 128),
        query=positive(raw, "q_lora_rank") if raw.get("q_lora_rank") else 0,
    )
    for wrong, name in (
        (not raw.get("rope_interleave", True), "rope_interleave false"),
        (raw.get("moe_layer_freq", 1) != 1, "moe_layer_freq other than 1"),
        (latent.rotated % 2 or latent.latent % 2, "an odd qk_rope_head_dim or kv_lora_rank"),
    ):
        if wrong:
            raise CheckpointError(f"config.json: {name} is not supported")
    head_dim = latent.latent + latent.rotated
    base = base_spec(raw | {"num_key_value_heads": 1, "head_dim": head_dim})
    return replace(
        base,
        latent=latent,
        interleaved=True,
        query_scale=(latent.plain + latent.rotated) ** -0.5 * _yarn_factor(base),
        experts=_experts(raw, base.layers, sigmoid),
    )


def _yarn_factor(base: ModelSpec) -> float:
    scaling = base.rope.values.get("mscale_all_dim") or 0
    factor = base.rope.values.get("factor") or 1.0
    if base.rope.kind == "default" or not scaling or factor <= 1:
        return 1.0
    return float((0.1 * scaling * math.log(factor) + 1.0) ** 2)


def _experts(raw: dict[str, Any], layers: int, sigmoid: bool) -> ExpertsSpec:
    count = positive(raw, "n_routed_experts", 256 if sigmoid else 64)
    limited = sigmoid or raw.get("topk_method", "greedy") == "group_limited_greedy"
    groups = positive(raw, "n_group", 8 if sigmoid else 1) if limited else 1
    chosen = positive(raw, "topk_group", 4 if sigmoid else 1) if limited else 1
    active = chosen_experts(raw, count, 8)
    if count % groups or chosen > groups or active > chosen * count // groups:
        raise CheckpointError(
            f"config.json: {active} of {count} experts from {chosen} of {groups} groups cannot be chosen"
        )
    shared = raw.get("n_shared_experts", 1 if sigmoid else 2)
    size = positive(raw, "moe_intermediate_size", 2048 if sigmoid else 1407)
    return ExpertsSpec(
        count=count,
        active=active,
        intermediate=size,
        layers=frozenset(range(raw.get("first_k_dense_replace", 3 if sigmoid else 0), layers)),
        normed=sigmoid and bool(raw.get("norm_topk_prob", True)),
        sigmoid=sigmoid,
        groups=groups,
        active_groups=chosen,
        factor=positive_number(raw, "routed_scaling_factor", 2.5 if sigmoid else 1.0),
        shared=size * shared if shared else 0,
        shared_name="shared_experts",
        shared_gate=False,
    )
