"""Norms and rotations by the compiled kernel: one call where torch needs several, and each row by
the same instructions, however many there are."""

import torch

from engine.backends.compiled.linear import compiled, takes_rows


def is_compiled(x: torch.Tensor) -> bool:
    """Whether rows of this type are computed here. x: [rows, width]."""
    return takes_rows(x) and x.stride(1) == 1


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight, rounded once. weight: float32 [width]."""
    rows, width = x.shape
    out = x.new_empty(rows, width)
    compiled().norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), width, rows, 1, width, eps,
        x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def norm_heads_(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """The same of each head in place. x: [rows, heads, dim], whose heads follow each other; weight:
    float32 [dim]."""
    compiled().norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), x.data_ptr(), x.stride(0), *x.shape, eps,
        x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip


def place_(
    x: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    pool: torch.Tensor,
    slots: torch.Tensor,
    heads: tuple[int, int, int],
) -> None:
    """Rotates heads of x in place, and stores some in the pool.

    x: [rows, width]; angles: cosines and signed sines of the rotated heads, [rows, rotated * dim]; pool:
    a head of a position each row, [KV slots, dim]; slots: [rows, stored]; heads: (how many are rotated,
    the first that is stored, how many are).
    """
    cos, sin = angles
    compiled().place(
        x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0), pool.data_ptr(),
        slots.data_ptr(), (x.shape[0], *heads, pool.shape[1]), x.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )  # fmt: skip


def greatest_ids(logits: torch.Tensor) -> torch.Tensor:
    """The first id of each row's greatest logit; -1 where one is not a number, or the greatest is
    infinite. logits: float32 [rows, vocab], on a CPU."""
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(rows, dtype=torch.int64)
    compiled().greatest(logits.data_ptr(), logits.stride(0), vocab, ids.data_ptr(), rows)
    return ids
