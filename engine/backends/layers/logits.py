"""What a model does to the logits of its head."""

import torch

from engine.model_spec import ModelSpec


def finish_logits(logits: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """In place, in float32. The order of a row's logits stays the same."""
    if spec.logit_scale != 1.0:
        logits.mul_(spec.logit_scale)
    cap = spec.logit_cap
    if cap is not None:
        # Over all rows, torch's loop on a CPU computes the last few values in another way.
        by_row = logits.device.type == "cpu" and len(logits)
        for part in logits.chunk(len(logits) if by_row else 1):
            part.div_(cap).tanh_().mul_(cap)
    return logits


def changes_logits(spec: ModelSpec) -> bool:
    return spec.logit_scale != 1.0 or spec.logit_cap is not None


def log_normalisers(logits: torch.Tensor) -> torch.Tensor:
    """The logarithms of the sums of the exponentials: [rows, 1]. On a CPU each row by itself, because
    torch adds a single row in another order than many."""
    if logits.device.type != "cpu" or not len(logits):
        return torch.logsumexp(logits, -1, keepdim=True)
    return torch.cat([torch.logsumexp(row, -1, keepdim=True) for row in logits.chunk(len(logits))])
