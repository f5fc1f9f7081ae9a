"""What a model does to the logits of its head."""

import torch

from engine.model_spec import ModelSpec


def finish_logits(logits: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """In place, in float32. The order of a row's logits stays the same."""
    if spec.logit_scale != 1.0:
        logits.mul_(spec.logit_scale)
    cap = spec.logit_cap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
