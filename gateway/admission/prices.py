"""Prices and money limits in memory, refreshed from the database every second.

Only the first request of a key whose tenant has budgets or a wallet waits for a query.
"""

import asyncio
import logging
import threading
from datetime import datetime, timedelta

from msgspec import Struct
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.notices import budgets
from billing.notices.tables import Budget
from billing.pricing.prices import load_price_book
from billing.pricing.pricing import Counts, PriceBook, PriceVersion
from billing.rating.unrated import UnratedUsage
from core.clock import Clock
from core.database import Database
from core.errors import DependencyDown, NotFound
from core.events import UsageEvent
from core.tenants.keys import Principal
from core.tenants.plans import BATCH_PRIORITY
from gateway.admission.request import AdmissionRequest, MoneyLimit
from gateway.edge.threads import Work, run_as

log = logging.getLogger("tollhouse.prices")
REFRESH_S = 1.0
_LIMITS_TTL = timedelta(minutes=10)  # after a key's last request its limits are dropped
_MAX_CACHED_BOUNDS = 4_096  # at most 1 MB
_NO_LABELS: frozenset[str] = frozenset()

Owner = tuple[str, str, str, str | None]  # tenant, project, key, and labels that have budgets
Limits = tuple[MoneyLimit, ...]


class Quote(Struct, frozen=True):
    price: PriceVersion
    money: tuple[MoneyLimit, ...]  # budgets and balances that must cover the request


class PriceList:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._book = PriceBook(())
        self._limited: frozenset[str] = frozenset()  # tenants with budgets or a wallet
        self._labels: dict[str, frozenset[str]] = {}  # that have budgets, by tenant
        self._money: dict[Owner, Limits] = {}
        self._seen: dict[Owner, datetime] = {}
        self._unrated = UnratedUsage()
        self._refreshing = threading.Lock()

    def refresh(self) -> None:
        """Blocking; run in a thread."""
        with self._refreshing:  # an older read must not replace a newer one
            self._refresh()

    def _refresh(self) -> None:
        now = self._clock.now()
        with self._database.snapshot() as session:
            book = load_price_book(session)
            limited = _limited_tenants(session)
            by_label = budgets.hard_labels(session)
            self._unrated.refresh(session, limited, book)
            request = [o for o, seen in list(self._seen.items()) if now - seen < _LIMITS_TTL]
            reader = budgets.LimitReader(session, now, self._unrated)
            money = {o: _limits(reader, o) for o in request if o[0] in limited}
        if book.versions != self._book.versions:
            self._book = book
        self._money, self._limited, self._labels = money, limited, by_label
        for owner in [o for o, seen in list(self._seen.items()) if now - seen >= _LIMITS_TTL]:
            self._seen.pop(owner, None)

    async def run(self) -> None:
        """Runs until cancelled. While the database is down the last prices stay in use."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await run_as(Work.OWN, self.refresh)
            except Exception as error:
                log.warning("could not refresh prices, keeping the last known ones: %s", error)

    @property
    def book(self) -> PriceBook:
        """As it is now."""
        return self._book

    async def quote(self, request: AdmissionRequest, at: datetime) -> Quote:
        """Raises NotFound when no price is in force."""
        price = None
        if request.tier is not None:
            price = self._book.pin_tier(
                request.tenant_id, request.model, request.tier, at, request.currency
            )
        if price is None:
            price = self._pin_some(request, at)
        if price is None:
            price = self._book.pin(
                request.tenant_id, request.model, request.adapter, at, request.currency
            )
        if request.tenant_id not in self._limited:
            return Quote(price, ())
        return Quote(price, await self._money_of(self.owner_of(request), at))

    def owner_of(self, request: AdmissionRequest) -> Owner:
        known = self._labels.get(request.tenant_id, _NO_LABELS)
        given = request.labels
        if given is not None:
            given = ",".join(label for label in given.split(",") if label in known) or None
        return (request.tenant_id, request.project_id, request.key_id, given)

    def _pin_some(self, request: AdmissionRequest, at: datetime) -> PriceVersion | None:
        """The price of a long prompt, else of a line of a batch, where there is one."""
        owner = (request.tenant_id, request.model)
        found = self._book.pin_long(*owner, request.prompt_tokens, at, request.currency)
        if found is None and request.tier is None and request.plan.priority == BATCH_PRIORITY:
            found = self._book.pin_batch(*owner, at, request.currency)
        return found

    def cached_price(self, request: AdmissionRequest, at: datetime) -> PriceVersion:
        """The price of an answer from the response cache."""
        return self._book.pin_cached(
            request.tenant_id, request.model, request.adapter, at, request.currency
        )

    def most_of(
        self, principal: Principal, model: str, prompt_tokens: int, output_tokens: int
    ) -> int | None:
        """The most picounits that a request of this size may cost; None without a price."""
        owner, at = (principal.tenant_id, model), self._clock.now()
        price = self._book.pin_long(*owner, prompt_tokens, at, principal.currency)
        if price is None:
            try:
                price = self._book.pin(*owner, None, at, principal.currency)
            except NotFound:
                return None
        return price.upper_bound(prompt_tokens, output_tokens, adapter=False)

    def cost_of_event(self, event: UsageEvent) -> int:
        price = self._book.by_id.get(event.price_version)
        return price.cost(Counts.of_event(event)) if price is not None else 0

    async def _money_of(self, owner: Owner, at: datetime) -> Limits:
        self._seen[owner] = at
        known = self._money.get(owner)
        if known is None:
            known = await self.read_limits(owner)
        return known

    async def read_limits(self, owner: Owner) -> Limits:
        """From the database, not from memory. DependencyDown if it does not answer."""
        try:
            found = await asyncio.to_thread(self._read, owner, self._clock.now())
        except SQLAlchemyError:
            raise DependencyDown(
                "The budget cannot be checked: the database does not answer.",
                next_step="Try again shortly.",
                retry_after_s=2.0,
            ) from None
        self._money[owner] = found
        return found

    def _read(self, owner: Owner, at: datetime) -> Limits:
        unrated = UnratedUsage()
        with self._database.snapshot() as session:
            unrated.refresh(session, frozenset((owner[0],)), load_price_book(session))
            return _limits(budgets.LimitReader(session, at, unrated), owner)


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


def _limited_tenants(session: Session) -> frozenset[str]:
    now_open = select(Budget.tenant_id).where(Budget.ended_at.is_(None), Budget.hard)
    prepaid = select(BillingAccount.tenant_id).where(BillingAccount.prepaid_only)
    return frozenset(session.scalars(now_open.union(prepaid)))


def _limits(reader: budgets.LimitReader, owner: Owner) -> Limits:
    found = reader.of_key(*owner[:3]) + reader.of_labels(owner[0], owner[3])
    return tuple(MoneyLimit(limit.key, limit.cap_units, limit.spent_units) for limit in found)
