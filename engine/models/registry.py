"""Chooses the model family for a checkpoint's `config.json`."""

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.config_fields import check_fields, without_nulls
from engine.models.families import (
    bloom,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    falcon,
    gemma2,
    gemma3,
    gemma3_conditional,
    gemma3n,
    gemma3n_conditional,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    mpt,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from engine.models.formats.quantised import refuse_quantised
from engine.regular_files import read_text

_MODULES = (
    llama, mistral, qwen2, qwen3, gemma2, granite, olmo2, smollm3, phi3, mixtral, qwen2_moe, qwen3_moe,
    gemma3, gemma3_conditional, cohere, cohere2, gpt_oss, bloom, mpt, falcon, deepseek_v2,
    deepseek_v3, gemma3n, gemma3n_conditional,
)  # fmt: skip
FAMILIES = {module.ARCHITECTURE: module for module in _MODULES}
# What transformers 5 assumes of a field that config.json leaves out, where base_spec does not.
_ABSENT: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": {"rope_theta": 500000.0},
    "DeepseekV2ForCausalLM": {"q_lora_rank": 1536},
    "DeepseekV3ForCausalLM": {"q_lora_rank": 1536},
    "Gemma2ForCausalLM": {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4,
    },
    "GptOssForCausalLM": {"num_key_value_heads": 8},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen2MoeForCausalLM": {"num_key_value_heads": 16},
    "Qwen3ForCausalLM": {"head_dim": 128, "num_key_value_heads": 32},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4},
    "SmolLM3ForCausalLM": {"num_key_value_heads": 4},
}  # fmt: skip


def read_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's raw configuration.

    Raises CheckpointError when the file is absent or is not a JSON object, or for a value that no
    model can have.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(read_text(path))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: use a directory in Hugging Face layout"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    check_fields(raw)
    return raw


def model_spec(raw: dict[str, Any]) -> ModelSpec:
    """The model's spec. Raises CheckpointError for a family or value that is not supported."""
    check_fields(raw)
    raw = _with_one_rope(without_nulls(raw))
    names = raw.get("architectures") or []
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise CheckpointError(
            f"config.json: architectures is {names!r}: supported are {', '.join(sorted(FAMILIES))}"
        )
    for usual, own in getattr(family, "ALIASES", {}).items():
        if own in raw:
            raw = {usual: raw[own]} | raw
    for needed in ("num_hidden_layers", "model_type"):
        if (raw.get("text_config") or raw).get(needed) is None:
            raise CheckpointError(f"config.json: {needed} is missing")
    raw = _ABSENT.get(family.ARCHITECTURE, {}) | raw
    refuse_quantised(raw)
    try:
        spec: ModelSpec = family.spec(raw)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"config.json: a value cannot be read as {family.ARCHITECTURE} has it: {error!r}"
        ) from None
    return spec


def _with_one_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """With `rope_scaling` in place of `rope_parameters` where a file has both: transformers takes the
    older field. One by kind of layer is left to its family."""
    older, newer = raw.get("rope_scaling"), raw.get("rope_parameters") or {}
    if not older or not newer or any(isinstance(part, dict) for part in newer.values()):
        return raw
    return raw | {"rope_parameters": older}
