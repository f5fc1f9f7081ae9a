"""The training loop that the base model and the adapters share."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from training.demo import distributed
from training.demo.batches import Batch
from training.demo.settings import Schedule


def rate_at(share: float, schedule: Schedule) -> float:
    """The learning rate after a share of all steps: a short warm-up, then a cosine to zero."""
    if share < schedule.warmup_share:
        return schedule.learning_rate * share / schedule.warmup_share
    left = (1 - share) / (1 - schedule.warmup_share)
    return schedule.learning_rate * 0.5 * (1 - math.cos(math.pi * left))


def loss_of(decoder: Any, head: torch.nn.Linear, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the learnt tokens; padding is last, so causal attention ignores it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = decoder(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
        logits = head(hidden[batch.learnt])
    return cross_entropy(logits.float(), batch.ids[:, 1:][batch.learnt])


def optimiser_for(weights: Iterable[torch.nn.Parameter], decay: float) -> torch.optim.AdamW:
    trained = [weight for weight in weights if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.dim() > 1], "weight_decay": decay},
        {"params": [weight for weight in trained if weight.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.95), fused=True
    )


def fit(
    decoder: Any, head: torch.nn.Linear, weights: Iterable[torch.nn.Parameter],
    steps: Sequence[Batch], schedule: Schedule,
) -> float:  # fmt: skip
    """Trains over the batches once; returns the mean loss of the last twentieth."""
    weights = [weight for weight in weights if weight.requires_grad]
    optimiser = optimiser_for(weights, schedule.weight_decay)
    losses: list[float] = []
    began, seen = time.monotonic(), 0
    steps = distributed.shard(steps)
    for step, batch in enumerate(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate_at((step + 1) / len(steps), schedule)
        loss = loss_of(decoder, head, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        distributed.average_gradients(weights)
        torch.nn.utils.clip_grad_norm_(weights, schedule.clip)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        seen += batch.ids.numel()
        if distributed.rank() == 0 and (step % 50 == 49 or step + 1 == len(steps)):
            speed = distributed.size() * seen / (time.monotonic() - began)
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step + 1}/{len(steps)} loss {mean:.4f} {speed:.0f} tokens/s", flush=True)
    last = losses[-max(1, len(losses) // 20) :]
    return sum(last) / len(last)
