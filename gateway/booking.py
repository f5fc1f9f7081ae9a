"""Admission on real limits, pinned prices and money: one reservation a request, settled once."""

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from core.clock import Clock
from core.errors import TollhouseError
from gateway.admission import Booking, LimitState, Spent, Wanted
from gateway.limits import Ask, Counted, Limiter, MoneyLimit, Reservation

log = logging.getLogger("tollhouse.booking")
_STEP = 64  # output tokens by which a money hold is extended
_NO_LIMIT = 1 << 60


class Price(Protocol):
    """A pinned price version. Amounts are picounits."""

    @property
    def id(self) -> str: ...

    def upper_bound(
        self, prompt_tokens: int, max_output_tokens: int, *, adapter: bool = True
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Quote:
    price: Price
    money: tuple[MoneyLimit, ...]  # budgets and balances that must cover the request


class Prices(Protocol):
    """In memory, refreshed off the path."""

    async def quote(self, wanted: Wanted, at: datetime) -> Quote:
        """NotFound where no price is in force."""

    def cost(self, quote: Quote, spent: Spent, *, adapter: bool) -> int: ...


class LimitedBooking:
    def __init__(
        self, limiter: Limiter, prices: Prices, held: Reservation, quote: Quote, *, adapter: bool
    ) -> None:
        self.price_version = quote.price.id
        self._limiter = limiter
        self._prices = prices
        self._held = held
        self._quote = quote
        self._adapter = adapter
        self.covered = self._reach()

    def limits(self) -> LimitState:
        held = self._held
        return LimitState(held.buckets, held.mode, held.queued_ms, held.shadow)

    async def extend(self, output_tokens: int) -> bool:
        await self._limiter.extend(self._held, max(_STEP, output_tokens - self.covered))
        self.covered = self._reach()
        return self.covered >= output_tokens

    async def settle(self, spent: Spent) -> None:
        try:
            if spent.served:
                await self._limiter.settle(self._held, self._counted(spent))
            else:
                await self._limiter.release(self._held)
        except TollhouseError as error:
            log.warning("a reservation was not settled and will lapse: %s", error.message)

    def _counted(self, spent: Spent) -> Counted:
        cost = self._prices.cost(self._quote, spent, adapter=self._adapter)
        return Counted(spent.input_tokens, spent.cached_tokens, spent.output_tokens, cost)

    def _reach(self) -> int:
        covered = self._held.covered_output_tokens
        return _NO_LIMIT if covered is None else covered


class LimitedAdmission:
    def __init__(self, limiter: Limiter, prices: Prices, clock: Clock) -> None:
        self._limiter = limiter
        self._prices = prices
        self._clock = clock

    async def book(self, wanted: Wanted) -> Booking:
        adapter = wanted.target.adapter is not None
        quote = await self._prices.quote(wanted, self._clock.now())
        held = await self._limiter.reserve(_ask(wanted, quote, adapter=adapter))
        return LimitedBooking(self._limiter, self._prices, held, quote, adapter=adapter)


def _ask(wanted: Wanted, quote: Quote, *, adapter: bool) -> Ask:
    principal, price = wanted.principal, quote.price
    base = price.upper_bound(wanted.prompt_tokens, 0, adapter=adapter)
    one_more = price.upper_bound(wanted.prompt_tokens, 1, adapter=adapter) - base
    return Ask(
        request_id=wanted.request_id,
        tenant_id=principal.tenant_id,
        project_id=principal.project_id,
        key_id=principal.key_id,
        model=wanted.target.model.name,
        plan=principal.plan,
        prompt_tokens=wanted.prompt_tokens,
        max_output_tokens=wanted.max_tokens,
        choices=wanted.choices,
        money=quote.money,
        base_cost_units=base,
        output_cost_units=one_more,
        deadline_s=wanted.timeout_s,
    )
