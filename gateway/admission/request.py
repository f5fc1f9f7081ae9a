"""The admission interface: a reservation over limits, prices and money before a request runs.

One reservation spans all scopes, all or nothing, and is settled exactly once.
"""

from typing import Protocol

from msgspec import Struct

from core.counters import BucketState
from core.tenants.keys import Principal
from gateway.catalog.catalog import Target


class AdmissionRequest(Struct, frozen=True):
    """The size of a request before it runs. `max_tokens` is the output limit of each choice."""

    request_id: str
    principal: Principal
    target: Target
    route: str
    prompt_tokens: int
    max_tokens: int
    choices: int
    timeout_s: float


class SettledUsage(Struct, frozen=True):
    """The usage to settle. With `served` false nothing was processed and nothing is charged."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    waived_tokens: int = 0
    status: int = 200
    served: bool = True


class LimitState(Struct, frozen=True):
    """The state of the limits, for the response headers."""

    buckets: tuple[BucketState, ...] = ()
    mode: str = "shared"
    queued_ms: int = 0
    shadow: tuple[str, ...] = ()


class Reservation(Protocol):
    price_version: str
    covered: int  # output tokens that the held money pays for

    def limits(self) -> LimitState: ...

    async def extend(self, output_tokens: int) -> bool:
        """Cover at least `output_tokens` in total; False when the money does not suffice."""

    async def settle(self, usage: SettledUsage) -> None:
        """Never raises."""


class Admission(Protocol):
    async def reserve(self, request: AdmissionRequest) -> Reservation:
        """May wait in the plan's queue. Raises RateLimited, InsufficientQuota or Unavailable."""
