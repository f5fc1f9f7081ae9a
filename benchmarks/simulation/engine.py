"""An engine as gateways see it: it keeps a receipt until it is acknowledged, and may not answer."""

from dataclasses import dataclass, field
from datetime import timedelta

from benchmarks.simulation.faults import Faults
from core.clock import FakeClock
from core.errors import Unavailable
from core.events import OpenedRequest
from engine.protocol import FinishReason, Receipt
from gateway.request.engine import RequestStillRunning
from tests.billing.simulation.books import Happened

ENGINE = "engine0"
LONGEST_LIFE_S = 600.0
# A request that has no receipt for this long is closed without tokens.
_GIVEN_UP = timedelta(seconds=LONGEST_LIFE_S + 60)


@dataclass
class Engine:
    faults: Faults
    clock: FakeClock
    happened: Happened
    receipts: dict[str, Receipt] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)  # request ids

    def run(self, opened: OpenedRequest, cached: int, generated: int, delivered: int) -> Receipt:
        made = Receipt(
            request_id=opened.request_id,
            namespace=opened.tenant_id,
            adapter=opened.adapter,
            prompt=opened.prompt_tokens,
            cached=cached,
            computed=opened.prompt_tokens - cached,
            unprocessed=0,
            generated=generated,
            delivered=delivered,
            recomputed=0,
            discarded=0,
            finish_reason=self.faults.chance.choice(list(FinishReason)),
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
        )
        self.receipts[opened.request_id] = made
        self.ran.add(opened.request_id)
        return made

    def forget(self, *request_ids: str) -> None:
        for each in request_ids:
            self.receipts.pop(each, None)

    async def receipts_of(self, opened: OpenedRequest) -> list[Receipt]:
        if self.faults.strike("request still runs", 0.1):
            raise RequestStillRunning("it still runs", next_step="Ask later.")
        if self.faults.strike("engine does not answer", 0.1):
            if self.clock.now() - opened.opened_at >= _GIVEN_UP:
                self.happened.was_given_up(opened.request_id)
            raise Unavailable("the engine does not answer", next_step="Ask later.")
        found = self.receipts.get(opened.request_id)
        if found is None and opened.request_id not in self.ran:
            self.happened.was_given_up(opened.request_id)
        return [] if found is None else [found]

    async def acknowledge(self, request_ids: list[str]) -> None:
        if not self.faults.strike("acknowledgement of a receipt lost"):
            self.forget(*request_ids)
