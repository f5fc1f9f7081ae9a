"""Data-parallel training: each process computes a share of the batches; gradients are averaged."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

T = TypeVar("T")


def run(work: Callable[[], None], processes: int) -> None:
    """Runs the same work in every process; a single process needs no process group."""
    if processes == 1:
        torch.set_num_threads(1)
        work()
        return
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        spawn(run_process, (work, processes, rendezvous), nprocs=processes)  # type: ignore[no-untyped-call]


def run_process(rank: int, work: Callable[[], None], processes: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rendezvous, rank=rank, world_size=processes)
    work()
    distributed.destroy_process_group()


def size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def shard(steps: Sequence[T]) -> list[T]:
    """This process's share; all shares have the same size, and the rest is dropped."""
    count = len(steps) // size()
    return list(steps[rank() :: size()][:count])


def average_gradients(weights: Sequence[torch.nn.Parameter]) -> None:
    """Replaces every gradient by its mean over the processes."""
    if size() == 1:
        return
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= size()
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def barrier() -> None:
    if size() > 1:
        distributed.barrier()
