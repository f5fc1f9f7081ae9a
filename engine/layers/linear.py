"""A linear layer whose weight is packed once for the processor, where torch has the op for it."""

import torch
import torch.nn.functional as F


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this type are packed: oneDNN's own layout reads a single row twice as fast
    as the plain one and gives the same bits."""
    ops = torch.ops.mkldnn
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


class Linear:
    """y = x W^T + b. Weight: [out, in]. The given weight may be freed after packing."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.packed = can_pack(weight.dtype, weight.device)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return out
