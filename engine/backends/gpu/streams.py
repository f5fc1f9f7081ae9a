"""CUDA streams other than the main one."""

import torch


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A new stream, or None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
