"""Prices and money limits in memory: read from the database every second, never on the path."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime

from sqlalchemy.orm import Session

from billing.prices import load_price_book
from billing.pricing import Counts, PriceBook
from core.database import Database
from gateway.admission import Spent, Wanted
from gateway.booking import Quote
from gateway.limits import MoneyLimit

log = logging.getLogger("tollhouse.prices")
REFRESH_S = 1.0

# All money limits by tenant, each with the owner that it is for: a tenant, project or key id.
MoneyLimits = Mapping[str, tuple[tuple[str, MoneyLimit], ...]]


class PriceList:
    def __init__(
        self, database: Database, money: Callable[[Session], MoneyLimits] | None = None
    ) -> None:
        self._database = database
        self._read_money = money
        self._book = PriceBook(())
        self._money: MoneyLimits = {}

    def refresh(self) -> None:
        """Blocking; run in a thread."""
        with self._database.read() as session:
            book = load_price_book(session)
            money = self._read_money(session) if self._read_money is not None else {}
        if book.versions != self._book.versions:
            self._book = book
        self._money = money

    async def run(self) -> None:
        """For ever; while the database is down the last prices go on."""
        while True:
            try:
                await asyncio.to_thread(self.refresh)
            except Exception as error:
                log.warning("prices could not be refreshed, the last ones hold: %s", error)
            await asyncio.sleep(REFRESH_S)

    def quote(self, wanted: Wanted, at: datetime) -> Quote:
        principal, target = wanted.principal, wanted.target
        adapter = target.adapter.name if target.adapter else None
        price = self._book.pin(principal.tenant_id, target.model.name, adapter, at)
        limits = self._money.get(principal.tenant_id, ())
        owners = (principal.tenant_id, principal.project_id, principal.key_id)
        return Quote(price, tuple(limit for owner, limit in limits if owner in owners))

    def cost(self, quote: Quote, spent: Spent, *, adapter: bool) -> int:
        price = self._book.by_id.get(quote.price.id)
        if price is None:
            return quote.price.upper_bound(spent.input_tokens, spent.output_tokens, adapter=adapter)
        return price.cost(
            Counts.of_answer(
                spent.input_tokens,
                spent.cached_tokens,
                spent.output_tokens,
                spent.waived_tokens,
                adapter=adapter,
                status=spent.status,
            )
        )
