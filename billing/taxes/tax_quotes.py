"""Answers of a remote tax service, stored by what was asked.

An invoice is built inside a transaction that holds the tenants' locks, and a service is asked outside
of it: the transaction that misses an answer is rolled back, the answers are fetched and stored, and it
runs again. An answer belongs to exactly one request (its digest), so it cannot be used for other
amounts, dates or addresses.
"""

import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.taxes.tables import TaxQuote
from billing.taxes.tax_rates import RateTable
from billing.taxes.taxes import Tax, TaxRequest, TaxService
from core.clock import Clock
from core.database import Database, insert_new
from core.errors import Unavailable

Result = TypeVar("Result")
_ROUNDS = 5  # a request changes only when usage arrives while the service is asked


class QuotesMissing(Exception):
    """Some answers are not stored yet; the transaction must be rolled back."""

    def __init__(self, requests: Sequence[TaxRequest]) -> None:
        super().__init__(f"{len(requests)} tax requests have no answer yet")
        self.requests = list(requests)


class StoredQuotes:
    """The tax service inside a transaction. `complete` must be called before the commit."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._missing: list[TaxRequest] = []

    def taxes(self, request: TaxRequest) -> list[Tax]:
        if not request.buyer.region or not any(each.net_minor for each in request.supplies):
            return []
        found = self._session.get(TaxQuote, digest(request))
        if found is None:
            self._missing.append(request)
            return []
        return msgspec.convert(found.taxes, list[Tax])

    def complete(self) -> None:
        """Raises QuotesMissing unless every request had its answer."""
        if self._missing:
            raise QuotesMissing(self._missing)


def with_taxes(
    database: Database,
    clock: Clock,
    service: TaxService | None,
    build: Callable[[Session, TaxService], Result],
) -> Result:
    """Run `build` in a transaction with the taxes of the service, or of our own rates if None."""
    if service is None:
        with database.transaction() as session:
            return build(session, RateTable(session))
    for _ in range(_ROUNDS):
        try:
            with database.transaction() as session:
                stored = StoredQuotes(session)
                result = build(session, stored)
                stored.complete()
                return result
        except QuotesMissing as missing:
            answers = [(request, service.taxes(request)) for request in missing.requests]
            with database.transaction() as session:
                _store(session, answers, clock.now())
    raise Unavailable(
        f"The amounts of the invoices changed {_ROUNDS} times while their taxes were asked for.",
        next_step="The next invoice run tries again.",
        code="taxes_unavailable",
        retry_after_s=60.0,
    )


def digest(request: TaxRequest) -> str:
    return hashlib.sha256(msgspec.json.encode(request)).hexdigest()


def _store(
    session: Session, answers: Sequence[tuple[TaxRequest, list[Tax]]], now: datetime
) -> None:
    rows = {
        digest(request): {
            "digest": digest(request),
            "taxes": msgspec.to_builtins(taxes),
            "asked_at": now,
        }
        for request, taxes in answers
    }
    known = set(session.scalars(select(TaxQuote.digest).where(TaxQuote.digest.in_(rows))))
    new = [row for key, row in rows.items() if key not in known]
    if new:
        insert_new(session, TaxQuote.__table__, new, "digest")  # type: ignore[arg-type]
