"""What the pipeline asks of limits, prices and money before a request may enter.

One reservation spans all scopes, all or nothing, and is settled exactly once.
"""

from dataclasses import dataclass
from typing import Protocol

from core.errors import TollhouseError
from core.tenants.keys import Principal
from gateway.catalog import Target
from gateway.exchange import Headers


@dataclass(frozen=True, slots=True)
class Wanted:
    """The size of a request before it runs. `max_tokens` is the most that each choice may have."""

    request_id: str
    principal: Principal
    target: Target
    route: str
    prompt_tokens: int
    max_tokens: int
    choices: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Spent:
    """What it came to. `served` is false when nothing was processed: then nothing is charged."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    served: bool = True


class Booking(Protocol):
    price_version: str
    covered: int  # output tokens that the money held so far pays for

    def headers(self) -> Headers: ...

    async def extend(self, output_tokens: int) -> bool:
        """Cover at least so many output tokens in all; False when the money does not."""

    async def settle(self, spent: Spent) -> None: ...


class Denied(Exception):
    """Not admitted: the error for the client, with the limits' headers as they stand."""

    def __init__(self, error: TollhouseError, headers: Headers) -> None:
        super().__init__(str(error))
        self.error = error
        self.headers = headers


class Admission(Protocol):
    async def book(self, wanted: Wanted) -> Booking:
        """Raises Denied or a TollhouseError; may wait in the plan's queue."""


class OpenBooking:
    """No limits, no money: what a house without plans and prices gives."""

    price_version = "free"

    def __init__(self, wanted: Wanted) -> None:
        self.covered = wanted.max_tokens * wanted.choices

    def headers(self) -> Headers:
        return []

    async def extend(self, output_tokens: int) -> bool:
        return True

    async def settle(self, spent: Spent) -> None:
        return None


class OpenAdmission:
    async def book(self, wanted: Wanted) -> Booking:
        return OpenBooking(wanted)
