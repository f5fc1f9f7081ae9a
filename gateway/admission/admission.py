"""Admission of a request: its price, then one reservation over limits and money."""

from datetime import datetime
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from billing.pricing import PriceVersion
from core.clock import Clock
from gateway.admission.limiter import Limiter
from gateway.admission.request import AdmissionRequest, MoneyLimit
from gateway.admission.reservation import Reservation

_MAX_CACHED_BOUNDS = 20_000


class Quote(Struct, frozen=True):
    price: PriceVersion
    money: tuple[MoneyLimit, ...]  # budgets and balances that must cover the request


class Prices(Protocol):
    """Prices and money limits, read from memory."""

    async def quote(self, request: AdmissionRequest, at: datetime) -> Quote:
        """Raises NotFound when no price is in force."""


class Admission:
    def __init__(self, limiter: Limiter, prices: Prices, clock: Clock) -> None:
        self._limiter = limiter
        self.request_rate = limiter.request_rate
        self._prices = prices
        self._clock = clock
        self._bounds = CostBounds()

    async def reserve(self, request: AdmissionRequest) -> Reservation:
        """May wait in the plan's queue. Raises RateLimited, InsufficientQuota or Unavailable."""
        quote = await self._prices.quote(request, self._clock.now())
        if quote.money:
            base, per_output_token = self._bounds.of(quote.price, request)
            request = replace(
                request,
                money=quote.money,
                base_cost_units=base,
                output_cost_units=per_output_token,
            )
        reservation = await self._limiter.reserve(request)
        reservation.price = quote.price
        return reservation


class CostBounds:
    """Cost bounds in picounits: (of the prompt, of one output token), cached by price version and
    prompt length. A price version never changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, bool], tuple[int, int]] = {}

    def of(self, price: PriceVersion, request: AdmissionRequest) -> tuple[int, int]:
        prompt_tokens, adapter = request.prompt_tokens, request.adapter is not None
        key = (price.id, prompt_tokens, adapter)
        bounds = self._known.get(key)
        if bounds is None:
            base = price.upper_bound(prompt_tokens, 0, adapter=adapter)
            bounds = base, price.upper_bound(prompt_tokens, 1, adapter=adapter) - base
            if len(self._known) >= _MAX_CACHED_BOUNDS:
                self._known.clear()
            self._known[key] = bounds
        return bounds
