"""What large requests leave behind returns to the system, also while other requests run."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.edge import memory

_SCRIPT = """
import asyncio, time
from gateway.edge import memory

assert memory.bound_arenas()

async def main():
    trimming = asyncio.create_task(memory.keep_trimmed(lambda: 1))
    await asyncio.sleep(0)
    blocks = [bytes(600) for _ in range(300_000)]
    high = memory._resident()
    last = blocks.pop()  # above all others, so that the top of the heap is in use
    blocks.clear()
    assert memory._resident() > high - (50 << 20), "nothing was left behind"
    until = time.monotonic() + 30
    while memory._resident() > high - (100 << 20):
        assert time.monotonic() < until, "it was not returned"
        await asyncio.sleep(0.1)
    trimming.cancel()
    return last

asyncio.run(main())
"""


@pytest.mark.skipif(memory._glibc() is None, reason="the allocator is not glibc's")
def test_memory_returns_while_requests_run() -> None:
    command = [sys.executable, "-c", _SCRIPT]
    subprocess.run(command, cwd=Path(__file__).parents[3], check=True, timeout=60)
