"""Streams beside the main one."""

import torch


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """None on a CPU, where everything runs in order anyway."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
