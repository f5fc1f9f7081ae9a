"""Runs work in a thread whose state the caller uses afterwards, also when the caller is cancelled."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, but a cancelled caller waits for the end of the work, so that nothing
    that it does next runs beside it. For work of less than about a second."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise
