"""Admission with limits, a pinned price and money: one reservation per request, settled once."""

import logging
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from core.clock import Clock
from core.errors import TollhouseError
from gateway.admission.limiter import (
    CountedUsage,
    CounterReservation,
    Limiter,
    LimitRequest,
    MoneyLimit,
)
from gateway.admission.request import AdmissionRequest, LimitState, Reservation, SettledUsage

log = logging.getLogger("tollhouse.admission")
_EXTEND_TOKENS = 64  # output tokens by which a money hold is extended
_NO_LIMIT = 1 << 60
_MAX_CACHED_BOUNDS = 20_000


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

    async def quote(self, request: AdmissionRequest, at: datetime) -> Quote:
        """Raises NotFound when no price is in force."""

    def cost(self, quote: Quote, usage: SettledUsage, *, adapter: bool) -> int: ...


class LimitedReservation:
    def __init__(
        self,
        limiter: Limiter,
        prices: Prices,
        reservation: CounterReservation,
        quote: Quote,
        *,
        adapter: bool,
    ) -> None:
        self.price_version = quote.price.id
        self._limiter = limiter
        self._prices = prices
        self._reservation = reservation
        self._quote = quote
        self._adapter = adapter
        self.covered = self._covered_tokens()

    def limits(self) -> LimitState:
        reservation = self._reservation
        return LimitState(
            reservation.buckets, reservation.mode, reservation.queued_ms, reservation.shadow
        )

    async def extend(self, output_tokens: int) -> bool:
        await self._limiter.extend(
            self._reservation, max(_EXTEND_TOKENS, output_tokens - self.covered)
        )
        self.covered = self._covered_tokens()
        return self.covered >= output_tokens

    async def settle(self, usage: SettledUsage) -> None:
        try:
            if usage.served:
                await self._limiter.settle(self._reservation, self._counted_usage(usage))
            else:
                await self._limiter.release(self._reservation)
        except TollhouseError as error:
            log.warning("a reservation was not settled and will expire: %s", error.message)

    def _counted_usage(self, usage: SettledUsage) -> CountedUsage:
        cost = self._prices.cost(self._quote, usage, adapter=self._adapter)
        return CountedUsage(usage.input_tokens, usage.cached_tokens, usage.output_tokens, cost)

    def _covered_tokens(self) -> int:
        covered = self._reservation.covered_output_tokens
        return _NO_LIMIT if covered is None else covered


class CostBounds:
    """Cost bounds in picounits: (of the prompt, of one output token), cached by price version and
    prompt length. A price version never changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, bool], tuple[int, int]] = {}

    def of(self, price: Price, prompt_tokens: int, *, adapter: bool) -> tuple[int, int]:
        key = (price.id, prompt_tokens, adapter)
        bounds = self._known.get(key)
        if bounds is None:
            base = price.upper_bound(prompt_tokens, 0, adapter=adapter)
            bounds = base, price.upper_bound(prompt_tokens, 1, adapter=adapter) - base
            if len(self._known) >= _MAX_CACHED_BOUNDS:
                self._known.clear()
            self._known[key] = bounds
        return bounds


class LimitedAdmission:
    def __init__(self, limiter: Limiter, prices: Prices, clock: Clock) -> None:
        self._limiter = limiter
        self._prices = prices
        self._clock = clock
        self._bounds = CostBounds()

    async def reserve(self, request: AdmissionRequest) -> Reservation:
        adapter = request.target.adapter is not None
        quote = await self._prices.quote(request, self._clock.now())
        reservation = await self._limiter.reserve(
            self._limit_request(request, quote, adapter=adapter)
        )
        return LimitedReservation(self._limiter, self._prices, reservation, quote, adapter=adapter)

    def _limit_request(
        self, request: AdmissionRequest, quote: Quote, *, adapter: bool
    ) -> LimitRequest:
        principal = request.principal
        base, per_output_token = self._bounds.of(
            quote.price, request.prompt_tokens, adapter=adapter
        )
        return LimitRequest(
            request_id=request.request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            model=request.target.model.name,
            plan=principal.plan,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_tokens,
            choices=request.choices,
            money=quote.money,
            base_cost_units=base,
            output_cost_units=per_output_token,
            deadline_s=request.timeout_s,
        )
