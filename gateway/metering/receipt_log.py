"""Receipts go from the engine's message straight to the spool, independently of request and meter.

The audit compares them with usage events. A usage event that is lost, duplicated or wrong
does not affect its receipt.
"""

from collections.abc import Callable
from datetime import datetime

from core.clock import Clock
from core.events import EngineCount
from engine.protocol import Receipt
from gateway.metering.spool import Spool

GUARD_NAMESPACE = "tollhouse:guard"  # requests of guard models: ours, and no usage event follows


class ReceiptLog:
    def __init__(self, spool: Spool, clock: Clock) -> None:
        self._spool = spool
        self._clock = clock

    def arrived(
        self, engine_id: str, receipt: Receipt, on_durable: Callable[[], None] | None = None
    ) -> None:
        """Spool the counts of a receipt. Called in the event loop, once for each arrival."""
        if receipt.namespace == GUARD_NAMESPACE:
            if on_durable is not None:
                on_durable()
            return
        self._spool.note_receipt(engine_count(engine_id, receipt, self._clock.now()), on_durable)


def engine_count(engine_id: str, receipt: Receipt, now: datetime) -> EngineCount:
    counts = (receipt.prompt, receipt.cached, receipt.generated)
    return EngineCount(receipt.request_id, engine_id, *counts, now, receipt.busy_us)
