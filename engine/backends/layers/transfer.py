"""Copies small host values to the device."""

from collections.abc import Sequence
from typing import Any

import torch


def on_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of the values. The copy to a GPU uses pinned memory, so that the host does not wait
    for the steps that still run there."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Like `on_device`, for a tensor on the host."""
    return pinned(host, device).to(device, non_blocking=True)


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy in pinned memory if the device is a GPU, otherwise the tensor itself."""
    return host.pin_memory() if device.type == "cuda" else host
