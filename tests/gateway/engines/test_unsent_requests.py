"""A request that ends while its connection is made: nothing was sent, so no receipt says otherwise."""

import asyncio
from typing import Any

import pytest

from engine.protocol import Receipt
from gateway.catalog.upstreams import Upstream
from gateway.engines.openai import OpenAIEngine
from tests.gateway.engines.test_upstreams import job


async def _engine() -> tuple[OpenAIEngine, asyncio.Event, list[Receipt]]:
    """An engine whose connections take until the event, and the receipts that it reports."""
    engine = OpenAIEngine(Upstream("http://127.0.0.1:9", max_in_flight=1), "m")
    connecting, receipts = asyncio.Event(), list[Receipt]()
    engine.on_receipt = lambda _engine_id, receipt: receipts.append(receipt)
    await engine.start()

    async def _connect() -> Any:
        connecting.set()
        await asyncio.Event().wait()

    engine._pool._connect = _connect  # type: ignore[method-assign]
    return engine, connecting, receipts


async def test_a_deadline_while_connecting_leaves_no_receipt_and_frees_the_place() -> None:
    engine, connecting, receipts = await _engine()
    for name in ("r1", "r2"):  # the second one finds the only place free
        connecting.clear()
        asked = asyncio.create_task(engine.generate(job(name)))
        await asyncio.wait_for(connecting.wait(), 30)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert receipts == [], "an event without tokens has no receipt with some"
    assert engine._running == {}
    await engine.close()
