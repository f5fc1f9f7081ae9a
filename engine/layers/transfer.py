"""Small host values on their way to the device."""

from collections.abc import Sequence
from typing import Any

import torch


def on_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of the values. To a GPU it goes through pinned memory, so that the host does not
    wait for the steps that are still under way there."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same for a tensor that is on the host already."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
