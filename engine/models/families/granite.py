"""Granite: Llama's block with factors for embedding, residual stream, attention and logits."""

from dataclasses import replace
from typing import Any

from engine.model_spec import ModelSpec
from engine.models.config_values import base_spec, positive_number

ARCHITECTURE = "GraniteForCausalLM"


def spec(raw: dict[str, Any]) -> ModelSpec:
    """The residual stream is kept divided by its factor, so that outputs are added to it as they are:
    a norm of the quotient is the same when its epsilon is divided by the factor's square."""
    base = base_spec(raw)
    residual = positive_number(raw, "residual_multiplier", 1.0)
    return replace(
        base,
        eps=base.eps / residual**2,
        query_scale=positive_number(raw, "attention_multiplier", 1.0),
        embedding_scale=positive_number(raw, "embedding_multiplier", 1.0) / residual,
        logit_scale=1.0 / positive_number(raw, "logits_scaling", 1.0),
    )
