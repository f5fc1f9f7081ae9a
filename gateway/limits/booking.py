"""Admission with limits, a pinned price and money: one reservation per request, settled once."""

import logging
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from core.clock import Clock
from core.errors import TollhouseError
from gateway.limits.admission import Booking, LimitState, Spent, Wanted
from gateway.limits.limiter import Ask, Counted, Limiter, MoneyLimit, Reservation

log = logging.getLogger("tollhouse.booking")
_STEP = 64  # output tokens by which a money hold is extended
_NO_LIMIT = 1 << 60
_BOUNDS_KEPT = 20_000


class Price(Protocol):
    """A pinned price version. Amounts are picounits."""

    @property
    def id(self) -> str: ...

    def upper_bound(
        self, prompt_tokens: int, max_output_tokens: int, *, adapter: bool = True
    ) -> int: ...


class Quote(Struct, frozen=True):
    price: Price
    money: tuple[MoneyLimit, ...]  # budgets and balances that must cover the request


class Prices(Protocol):
    """Prices and money limits, read from memory."""

    async def quote(self, wanted: Wanted, at: datetime) -> Quote:
        """Raises NotFound when no price is in force."""

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
            log.warning("a reservation was not settled and will expire: %s", error.message)

    def _counted(self, spent: Spent) -> Counted:
        cost = self._prices.cost(self._quote, spent, adapter=self._adapter)
        return Counted(spent.input_tokens, spent.cached_tokens, spent.output_tokens, cost)

    def _reach(self) -> int:
        covered = self._held.covered_output_tokens
        return _NO_LIMIT if covered is None else covered


class Bounds:
    """Cost bounds in picounits: (of the prompt, of one output token), cached by price version and
    prompt length. A price version never changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, bool], tuple[int, int]] = {}

    def of(self, price: Price, prompt_tokens: int, *, adapter: bool) -> tuple[int, int]:
        key = (price.id, prompt_tokens, adapter)
        found = self._known.get(key)
        if found is None:
            base = price.upper_bound(prompt_tokens, 0, adapter=adapter)
            found = base, price.upper_bound(prompt_tokens, 1, adapter=adapter) - base
            if len(self._known) >= _BOUNDS_KEPT:
                self._known.clear()
            self._known[key] = found
        return found


class LimitedAdmission:
    def __init__(self, limiter: Limiter, prices: Prices, clock: Clock) -> None:
        self._limiter = limiter
        self._prices = prices
        self._clock = clock
        self._bounds = Bounds()

    async def book(self, wanted: Wanted) -> Booking:
        adapter = wanted.target.adapter is not None
        quote = await self._prices.quote(wanted, self._clock.now())
        held = await self._limiter.reserve(self._ask(wanted, quote, adapter=adapter))
        return LimitedBooking(self._limiter, self._prices, held, quote, adapter=adapter)

    def _ask(self, wanted: Wanted, quote: Quote, *, adapter: bool) -> Ask:
        principal = wanted.principal
        base, one_more = self._bounds.of(quote.price, wanted.prompt_tokens, adapter=adapter)
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
