"""What the pipeline asks of limits, prices and money before a request may enter.

One reservation spans all scopes, all or nothing, and is settled exactly once.
"""

from typing import Protocol

from msgspec import Struct

from core.counters import BucketState
from core.tenants.keys import Principal
from gateway.catalog.catalog import Target


class Wanted(Struct, frozen=True):
    """The size of a request before it runs. `max_tokens` is the most that each choice may have."""

    request_id: str
    principal: Principal
    target: Target
    route: str
    prompt_tokens: int
    max_tokens: int
    choices: int
    timeout_s: float


class Spent(Struct, frozen=True):
    """What it came to. `served` is false when nothing was processed: then nothing is charged."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    waived_tokens: int = 0
    status: int = 200
    served: bool = True


class LimitState(Struct, frozen=True):
    """What the headers tell."""

    buckets: tuple[BucketState, ...] = ()
    mode: str = "shared"
    queued_ms: int = 0
    shadow: tuple[str, ...] = ()


class Booking(Protocol):
    price_version: str
    covered: int  # output tokens that the money held so far pays for

    def limits(self) -> LimitState: ...

    async def extend(self, output_tokens: int) -> bool:
        """Cover at least so many output tokens in all; False when the money does not."""

    async def settle(self, spent: Spent) -> None:
        """Never raises."""


class Admission(Protocol):
    async def book(self, wanted: Wanted) -> Booking:
        """RateLimited, InsufficientQuota or Unavailable; it may wait in the plan's queue."""
