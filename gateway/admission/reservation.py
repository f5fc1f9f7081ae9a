"""A reservation of limits and money, held from the admission of a request until its settlement."""

import logging
from dataclasses import dataclass
from typing import Protocol

from billing.pricing import PriceVersion
from core.counters import BucketGrant, BucketState, Counters
from core.errors import TollhouseError
from core.events import UsageEvent
from gateway.admission.planning import PlannedBuckets
from gateway.admission.request import UNUSED, AdmissionRequest, LimitState, SettledUsage

log = logging.getLogger("tollhouse.admission")
_EXTEND_TOKENS = 64  # output tokens by which a money hold is extended


class Settler(Protocol):
    """The part of the limiter that a reservation uses after the admission."""

    async def extend(self, reservation: "Reservation", output_tokens: int) -> int: ...

    async def settle(self, reservation: "Reservation", usage: SettledUsage) -> None: ...


@dataclass(slots=True, eq=False)
class Reservation:
    """`covered` is how many output tokens the held money pays for; deliver none beyond it before
    `extend`."""

    request: AdmissionRequest
    planned: PlannedBuckets
    grant: BucketGrant
    counters: Counters
    settler: Settler
    covered: int  # NO_LIMIT without a money limit
    held_units: int  # picounits
    mode: str = "shared"  # or "local": counted in this process while Redis is down
    queued_ms: int = 0
    ended: bool = False
    price: PriceVersion | None = None  # pinned for the request

    @property
    def price_version(self) -> str:
        return self.price.id if self.price is not None else ""

    @property
    def buckets(self) -> tuple[BucketState, ...]:
        return self.grant.buckets

    @property
    def shadow(self) -> tuple[str, ...]:
        """Keys of the shadow limits that would have refused this request."""
        return self.grant.shadow

    def limits(self) -> LimitState:
        return LimitState(self.grant.buckets, self.mode, self.queued_ms, self.grant.shadow)

    async def extend(self, output_tokens: int) -> bool:
        """Cover at least `output_tokens` in total; False when the money does not suffice."""
        await self.settler.extend(self, max(_EXTEND_TOKENS, output_tokens - self.covered))
        return self.covered >= output_tokens

    async def settle(self, event: UsageEvent | None) -> None:
        """Keep what the ledger charges for the event, and return the rest. Without an event nothing
        is charged. Only the first call counts. Never raises."""
        usage = UNUSED
        if event is not None:
            usage = SettledUsage.of_event(event, self.price if self.request.money else None)
        try:
            await self.settler.settle(self, usage)
        except TollhouseError as error:
            log.warning("a reservation was not settled and will expire: %s", error.message)
