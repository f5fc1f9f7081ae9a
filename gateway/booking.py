"""Admission on real limits, pinned prices and money: one reservation a request, settled once."""

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from core.clock import Clock
from core.counters import Counters
from core.errors import TollhouseError
from gateway.admission import Booking, Spent, Wanted
from gateway.exchange import Headers
from gateway.limits import LEASE_MS, Ask, Counted, Limiter, MoneyLimit, Reservation
from gateway.ratelimit_headers import ratelimit_headers

log = logging.getLogger("tollhouse.booking")
RENEW_S = LEASE_MS / 3000
_STEP = 64  # output tokens by which a money hold is extended


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

    def quote(
        self,
        tenant_id: str,
        project_id: str,
        key_id: str,
        model: str,
        adapter: str | None,
        at: datetime,
    ) -> Quote:
        """NotFound where no price is in force."""

    def cost(self, price: Price, spent: Spent, *, adapter: bool) -> int: ...


class LimitedBooking:
    def __init__(
        self, admission: "LimitedAdmission", held: Reservation, quote: Quote, *, adapter: bool
    ) -> None:
        self.price_version = quote.price.id
        self._adapter = adapter
        self._admission = admission
        self._held = held
        self._quote = quote
        self.covered = self._reach()

    def headers(self) -> Headers:
        return ratelimit_headers(self._held.buckets)

    async def extend(self, output_tokens: int) -> bool:
        more = max(_STEP, output_tokens - self.covered)
        await self._admission.limiter.extend(self._held, more)
        self.covered = self._reach()
        return self.covered >= output_tokens

    async def settle(self, spent: Spent) -> None:
        """Never raises: a reservation that cannot be settled now gives itself back by its lease."""
        self._admission.running.pop(self._held.ask.request_id, None)
        try:
            if spent.served:
                await self._admission.limiter.settle(self._held, self._counted(spent))
            else:
                await self._admission.limiter.release(self._held)
        except TollhouseError as error:
            log.warning("a reservation was not settled and will lapse: %s", error.message)

    def _counted(self, spent: Spent) -> Counted:
        cost = self._admission.prices.cost(self._quote.price, spent, adapter=self._adapter)
        return Counted(spent.input_tokens, spent.cached_tokens, spent.output_tokens, cost)

    def _reach(self) -> int:
        covered = self._held.covered_output_tokens
        return 1 << 60 if covered is None else covered


class LimitedAdmission:
    def __init__(self, limiter: Limiter, counters: Counters, prices: Prices, clock: Clock) -> None:
        self.limiter = limiter
        self.prices = prices
        self.running: dict[str, Reservation] = {}
        self._counters = counters
        self._clock = clock

    async def book(self, wanted: Wanted) -> Booking:
        principal, target = wanted.principal, wanted.target
        adapter = target.adapter.name if target.adapter else None
        quote = self.prices.quote(
            principal.tenant_id,
            principal.project_id,
            principal.key_id,
            target.model.name,
            adapter,
            self._clock.now(),
        )
        held = await self.limiter.reserve(_ask(wanted, quote, adapter is not None))
        self.running[wanted.request_id] = held
        return LimitedBooking(self, held, quote, adapter=adapter is not None)

    async def renew_leases(self) -> None:
        """Runs for ever: what is still running keeps its places and its money."""
        while True:
            await asyncio.sleep(RENEW_S)
            groups: dict[str, list[str]] = defaultdict(list)
            for held in self.running.values():
                groups[held.wish.group].append(held.wish.id)
            try:
                for group, ids in groups.items():
                    await self._counters.renew(group, ids, LEASE_MS)
            except TollhouseError as error:
                log.warning("leases could not be renewed: %s", error.message)


def _ask(wanted: Wanted, quote: Quote, adapter: bool) -> Ask:
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
