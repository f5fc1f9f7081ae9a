"""Memory that the pool and the adapters take only where they write, and give back."""

import sys

import pytest
import torch

from engine.backends.layers.host_memory import lazy_zeros, release

_PAGE = 1 << 16  # bytes: whole pages on every system


@pytest.mark.skipif(sys.platform != "linux", reason="advice to the kernel is Linux's")
def test_released_memory_is_given_back_and_reads_as_zeros() -> None:
    memory = lazy_zeros((4, _PAGE), torch.uint8)
    memory.fill_(7)
    release(memory[1:3])
    assert memory[1].max() == 0 or memory[2].max() == 0
    assert memory[0, 0] == 7 and memory[3, -1] == 7
