"""Where the kernel tests run, and how near a kernel must come to its reference."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def close(got: Tensor, want: Tensor) -> None:
    """Relative error of the whole, by the dtype's rounding, and no element off by far."""
    assert got.shape == want.shape
    limit = ROUNDING[got.dtype]
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12)
    assert error <= limit, f"relative error {error:.2e} over {limit:.0e}"
    torch.testing.assert_close(got.float(), want.float(), rtol=10 * limit, atol=10 * limit)
