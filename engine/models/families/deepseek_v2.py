"""DeepSeek V2 and V2-Lite: latent attention, and experts by softmax."""

from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.families.deepseek import deepseek_spec

ARCHITECTURE = "DeepseekV2ForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    if raw.get("norm_topk_prob"):
        raise CheckpointError("config.json: norm_topk_prob is not supported with DeepSeek V2")
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"config.json: topk_method is {method!r}: use greedy or group_limited_greedy"
        )
    return deepseek_spec(raw, sigmoid=False)
